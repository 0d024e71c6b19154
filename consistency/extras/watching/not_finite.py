"""Check 6: at the first NaN or infinity, the first block that made it, from its inputs.

In every step the norm of all gradients tells whether one is not finite; with DistributedDataParallel it is so on all
ranks at once. Then each rank computes its micro-batches of the step once more and looks at what enters and leaves each
module: the first one that makes NaN or infinity of finite inputs is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from consistency.errors import first_line
from consistency.extras.watching.kinds import NOT_FINITE_FROM
from consistency.extras.watching.micro_batch import MicroBatch, WatchedModel, buffers_kept, differentiable_outputs
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names


class Origin(NamedTuple):
    """The first module whose result is not finite, though its inputs are."""

    layer: str
    tensor: str
    batch: int
    """Number of the micro-batch in its step."""


def gradients_are_finite(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Report whether every gradient is finite, by the norm of all; False where that overflows."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in gradients if not gradient.is_sparse]  # torch takes no norm of these
    if not gradients:
        return True
    return bool(torch.nn.utils.get_total_norm(gradients).isfinite())


def check_origin(watched: WatchedModel, batches: Sequence[MicroBatch], talk: RankTalk, between: str) -> CheckOutcome:
    """Find where the first NaN or infinity of a step was made, on each rank."""
    outcome = CheckOutcome(check="where it began")
    origin, reason = None, ""
    try:
        origin = _origin(watched, batches)
    except Exception as error:  # model code may raise anything, and the other ranks wait for this one
        reason = first_line(error)
    origins = talk.gather((origin, reason))
    if talk.rank:
        return outcome
    for rank, (found, reason) in enumerate(origins):
        if found is not None:
            outcome.discoveries.append(_discovery(rank, Origin(*found), between))
        elif reason:
            outcome.not_checked = f"{rank_names([rank])}: {reason}"
    if not outcome.discoveries:
        outcome.discoveries.append(
            Discovery(
                kind=NOT_FINITE_FROM,
                message=f"a gradient is not finite, and computed once more all passes of all ranks are: {between}",
                ranks=tuple(range(talk.world)),
                next="a card or the sum of gradients made it: read the checks `this rank repeats` and `what is added "
                "up` of this step in watch.jsonl",
            )
        )
    return outcome


def _discovery(rank: int, origin: Origin, between: str) -> Discovery:
    if origin.tensor == "weight":
        what = f"{origin.layer} of {rank_names([rank])} is not finite itself"
    else:
        what = f"{origin.layer} of {rank_names([rank])} makes NaN or infinity of finite inputs, in its {origin.tensor}"
    return Discovery(
        kind=NOT_FINITE_FROM,
        message=f"{what}, micro-batch {origin.batch + 1} of the step: {between}",
        ranks=(rank,),
        tensors=((origin.layer, origin.tensor),),
        next="look at that module's inputs and dtype: an overflow of float16, a division by zero, a mask of a row; "
        "go back to the checkpoint before it",
    )


def _origin(watched: WatchedModel, batches: Sequence[MicroBatch]) -> Origin | None:
    if watched.is_split:
        raise ValueError("the model is split over the ranks: a pass needs all of them")
    for name, parameter in watched.parameters().items():
        if not _is_finite(parameter):
            return Origin(layer=name, tensor="weight", batch=0)
    for number, batch in enumerate(batches):
        place = _first_in_pass(watched, batch)
        if place is not None:
            return Origin(*place, batch=number)
    return None


def _first_in_pass(watched: WatchedModel, batch: MicroBatch) -> tuple[str, str] | None:
    """Return the module and the kind of result that first are not finite; None where all are finite."""
    forward: list[str] = []
    backward: list[str] = []
    handles: list[Any] = []
    for name, module in watched.model.named_modules():
        title = watched.own_name(name) or "the loss"
        handles.append(module.register_forward_hook(_noting_result(title, forward, backward)))
    try:
        with buffers_kept(watched.model), batch.conditions(watched.device):
            outputs = differentiable_outputs(watched.model(*batch.args, **batch.kwargs))
            if not forward and outputs:
                incoming = {} if batch.marks is None else dict(batch.marks.incoming)
                incoming = incoming or _ones_for_the_loss(outputs)
                wanted = [outputs[number] for number in incoming]
                parameters = list(watched.trainable().values())
                torch.autograd.grad(wanted, parameters, list(incoming.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    if forward:
        return forward[0], "output"
    return (backward[0], "gradient") if backward else None


def _ones_for_the_loss(outputs: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return a gradient of ones for the model's own loss, or for all of its outputs where it has none."""
    wanted = {0: outputs[0]} if 0 in outputs else outputs
    return {number: torch.ones_like(tensor) for number, tensor in wanted.items()}


def _noting_result(name: str, forward: list[str], backward: list[str]) -> Any:
    def note(_: torch.nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in _pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        # inner modules end before the module that holds them: the first to be noted is the innermost
        if all(map(_is_finite, tensors)) and not all(map(_is_finite, results)):
            forward.append(name)
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(_noting_gradient(name, backward))

    return note


def _noting_gradient(name: str, backward: list[str]) -> Any:
    def note(gradient: torch.Tensor) -> None:
        if not _is_finite(gradient):
            backward.append(name)

    return note


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.detach().isfinite().all())
