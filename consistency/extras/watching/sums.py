"""Check 5: the gradient that the optimizer gets is the sum of what the ranks computed.

In a step that is checked, hooks add up in float64 what each backward pass of this rank gives one tensor, which is
another one in each check. Before the optimizer's step the sums of all ranks are added, and compared with the tensor's
gradient. An average, a clipped norm or a scale multiplies the whole tensor by one number, which is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from consistency.capture.names import split_name
from consistency.extras.watching.kinds import WRONG_SUM
from consistency.extras.watching.micro_batch import WatchedModel
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names
from consistency.numerics.dtype import UNIT_ROUNDOFF

MOST_ELEMENTS = 1 << 20
"""Elements of a tensor that are taken, its first ones: each rank sends so many in float64."""

_OTHER_ROUNDINGS = 8
"""Roundings beside those of additions: the average, a scale and its removal, the clipped norm, and the fit, each
twice."""


@dataclass(slots=True)
class LocalSum:
    """What this rank's backward passes give one tensor in a step, in float64."""

    name: str
    parameter: torch.nn.Parameter
    total: torch.Tensor | None = None
    sizes: torch.Tensor | None = None
    passes: int = 0
    _handles: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Add up the gradients of the passes to come."""
        self.listen_to(self.parameter)

    def listen_to(self, parameter: torch.Tensor) -> None:
        """Add up the gradients that a tensor gets: the parameter, or the whole of one that is sharded."""
        self._handles.append(parameter.register_hook(self._add))

    def end(self) -> None:
        """Add up no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _add(self, gradient: torch.Tensor) -> None:
        values = _first_elements(gradient)
        self.total = values if self.total is None else self.total + values
        self.sizes = values.abs() if self.sizes is None else self.sizes + values.abs()
        self.passes += 1


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient whole, gathered from all ranks where it is sharded."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _first_elements(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().to_dense().reshape(-1)[:MOST_ELEMENTS].to("cpu", torch.float64)


def local_sum(watched: WatchedModel, number: int) -> LocalSum | None:
    """Return the sum of one trained tensor, another one for each number; None where nothing is trained."""
    trainable = watched.trainable()
    if not trainable or watched.is_split:
        return None
    name = list(trainable)[number % len(trainable)]
    return LocalSum(name=name, parameter=trainable[name])


def check_sum(watched: WatchedModel, local: LocalSum | None, talk: RankTalk, between: str) -> CheckOutcome:
    """Compare the gradient of one tensor with the sum of what the ranks computed."""
    outcome = CheckOutcome(check="what is added up")
    if talk.world == 1:
        outcome.not_checked = "one rank"
        return outcome
    if watched.is_split and local is None:
        outcome.not_checked = "the model is split: a rank keeps a part of each sum"
        return outcome
    if compression := watched.compression():
        outcome.not_checked = f"the training compresses its sums by torch's {compression}"
        return outcome
    sent = None
    if local is not None and local.total is not None and local.sizes is not None and local.parameter.grad is not None:
        sent = (local.total.numpy(), local.sizes.numpy(), local.passes)
    by_rank = talk.gather(sent)
    if local is None or local.parameter.grad is None or any(entry is None for entry in by_rank):
        outcome.not_checked = "a rank has no gradient of this tensor"
        return outcome
    outcome.figures["tensor"] = local.name
    totals = torch.stack([torch.from_numpy(total) for total, _, _ in by_rank])
    sizes = torch.stack([torch.from_numpy(size) for _, size, _ in by_rank]).sum(0)
    gradient = _first_elements(_whole(local.parameter.grad))
    additions = talk.world + sum(passes for _, _, passes in by_rank)
    dtype = local.parameter.grad.dtype
    outcome.not_checked = _why_not_judged(gradient, totals, dtype)
    if outcome.not_checked:
        return outcome
    ratio = ratio_of_sum(gradient, totals.sum(0), sizes, additions, dtype)
    outcome.figures["ratio"] = ratio
    if ratio > 1 and _is_clipped_by_value(gradient):
        outcome.not_checked = "gradients are clipped by value"
    elif ratio > 1 and talk.rank == 0:
        outcome.discoveries.append(_wrong_sum(local.name, gradient, totals, ratio, sizes, additions, dtype, between))
    return outcome


def _why_not_judged(gradient: torch.Tensor, totals: torch.Tensor, dtype: torch.dtype) -> str:
    if dtype not in UNIT_ROUNDOFF:
        return f"how {dtype} rounds is not known"
    if not bool(gradient.isfinite().all()) or not bool(totals.isfinite().all()):
        return "the gradient is not finite"
    if not bool(totals.any()):
        return "all ranks' gradients of this tensor are zero"
    return ""


def _is_clipped_by_value(gradient: torch.Tensor) -> bool:
    """Report whether several elements have the largest magnitude, as `clip_grad_value_` leaves them."""
    magnitudes = gradient.abs()
    return int((magnitudes == magnitudes.max()).sum()) > 1


def ratio_of_sum(
    gradient: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor, additions: int, dtype: torch.dtype
) -> float:
    """Return the largest error of a sum, over what additions in any order may do.

    Parameters
    ----------
    exact : torch.Tensor
        The sum in float64, up to one factor.
    sizes : torch.Tensor
        The sum of the magnitudes of all terms.
    additions : int
        How many terms were added, or averaged.
    """
    square = float(exact @ exact)
    factor = float(gradient @ exact) / square if square else 0.0
    # Higham 2002, section 4.2: a sum of n terms in any order is off by at most (n - 1) u times the sum of magnitudes
    allowed = (additions + _OTHER_ROUNDINGS) * UNIT_ROUNDOFF[dtype] * abs(factor) * sizes
    allowed = allowed + additions * torch.finfo(dtype).tiny
    error = (gradient - factor * exact).abs()
    if factor <= 0:
        return float("inf")
    return float((error / allowed).max())


def _wrong_sum(
    name: str,
    gradient: torch.Tensor,
    totals: torch.Tensor,
    ratio: float,
    sizes: torch.Tensor,
    additions: int,
    dtype: torch.dtype,
    between: str,
) -> Discovery:
    """Return the finding, with the rank that is left out where leaving it out explains the gradient."""
    layer, tensor = split_name(name)
    explanation, ranks = "", tuple(range(len(totals)))
    for rank in range(len(totals)):
        without = totals.sum(0) - totals[rank]
        if len(totals) > 2 and bool(without.any()) and ratio_of_sum(gradient, without, sizes, additions, dtype) <= 1:
            explanation, ranks = f"; without {rank_names([rank])} it is right: the sum leaves it out", (rank,)
            break
        if ratio_of_sum(gradient, totals[rank], sizes, additions, dtype) <= 1:
            explanation, ranks = f"; it is that of {rank_names([rank])} alone: nothing is added up", (rank,)
            if len(totals) == 2:
                explanation, ranks = f"{explanation}, or {rank_names([1 - rank])} is left out", (0, 1)
            break
    if not explanation:
        # the bound of few additions in bfloat16 holds those in float16 too: which of the two it was is not told
        is_lower = UNIT_ROUNDOFF[torch.bfloat16] > UNIT_ROUNDOFF[dtype]
        if is_lower and ratio_of_sum(gradient, totals.sum(0), sizes, additions, torch.bfloat16) <= 1:
            explanation = f"; it is right as a sum in bfloat16 or float16, which are less precise than {dtype}"
    return Discovery(
        kind=WRONG_SUM,
        message=f"the gradient of {name} is not the sum of what the ranks computed: off by {ratio:.3g} times what "
        f"additions in any order may do{explanation}: {between}",
        ranks=ranks,
        tensors=((layer, f"gradient of {tensor}"),),
        ratio=ratio,
        next="look for a hook that compresses or delays gradients, a backward pass inside no_sync(), or test the links "
        "(consistency run --stages collectives)",
    )
