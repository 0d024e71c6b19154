"""Decisions of intervals and windows: of an operation that is continuous, such as ReLU, the gradient alone jumps.

The backward pass of `threshold` at exactly 0 is not watched: torch computes it by the operation of ReLU's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from consistency.numerics.decision import Decide, Decision, is_real, name_of

_aten = torch.ops.aten


def _relu(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    """Autograd keeps the result, and lets the gradient through where that is positive."""
    x = args[0].clone() if func is _aten.relu_.default else args[0]
    found = func(*args, **kwargs)

    def force(wanted: torch.Tensor) -> Any:
        # the smallest number that no unit flushes to zero: the result changes by no more than the error of the operand
        closed = found.masked_fill(~wanted, 0)
        changed = closed.masked_fill(wanted & ~(closed > 0), torch.finfo(found.dtype).tiny)
        return found.copy_(changed) if func is _aten.relu_.default else changed

    return found, Decision(name="relu", operand=x, decided=x > 0, margins=torch.abs, force=force)


def between(kinks: Callable[[tuple[Any, ...]], Sequence[float]], place: int = 1) -> Decide:
    """Return what watches an operation whose operand lies in one of several intervals; without a kink it is none."""

    def decide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        x, ends = args[place], sorted(float(end) for end in kinks(args))
        if not ends:
            return func(*args, **kwargs), None
        decided = sum((x > end).to(torch.int8) for end in ends)
        assert isinstance(decided, torch.Tensor)

        def margins(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x - end).abs() for end in ends]).amin(0)

        def force(wanted: torch.Tensor) -> Any:
            # just across the nearest end of the wanted interval: within it the result depends on the operand too
            steps = [max(abs(end) * torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny) for end in ends]
            above = [ends[0], *(end + step for end, step in zip(ends, steps, strict=True))]
            below = [*(end - step for end, step in zip(ends, steps, strict=True)), ends[-1]]
            up, down = (torch.tensor(side, dtype=x.dtype, device=x.device)[wanted.long()] for side in (above, below))
            moved = torch.where(wanted > decided, up, down)
            substituted = torch.where(wanted == decided, x, moved)
            return func(*(substituted if i == place else a for i, a in enumerate(args)), **kwargs)

        decision = Decision(
            name=name_of(func).removesuffix("_backward"), operand=x, decided=decided, margins=margins, force=force
        )
        return func(*args, **kwargs), decision

    return decide


def _pooled(dims: int) -> Decide:
    """Return what watches the maximum of each window; its index counts through the last dimensions."""

    def decide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        found, x = func(*args, **kwargs), args[0]
        if not is_real(x):
            return found, None
        values, indices = found
        lead = x.shape[: x.dim() - dims]
        operand, decided = x.reshape(*lead, -1), indices.reshape(*lead, -1)

        def force(wanted: torch.Tensor) -> Any:
            return type(found)((operand.gather(-1, wanted).reshape(values.shape), wanted.reshape(indices.shape)))

        decision = Decision(
            name=name_of(func).removesuffix("_with_indices"), operand=operand, decided=decided,
            margins=lambda scores: scores, force=force, dim=len(lead), scores=2,
        )  # fmt: skip
        return found, decision

    return decide


OF_GRADIENTS: dict[Any, Decide] = {
    _aten.relu.default: _relu,
    _aten.relu_.default: _relu,
    _aten.leaky_relu_backward.default: between(lambda _: (0.0,)),
    _aten._prelu_kernel_backward.default: between(lambda _: (0.0,)),
    # both sides meet where the slope of the exponential at 0 is that of the line, as in ELU with alpha 1 and CELU
    _aten.elu_backward.default: between(lambda args: () if math.isclose(args[1] * args[3], 1) else (0.0,), 5),
    # of ReLU too, whose result is watched: at 0
    _aten.threshold_backward.default: between(lambda args: (args[2],) if args[2] != 0 else ()),
    _aten.hardtanh_backward.default: between(lambda args: (args[2], args[3])),
    _aten.hardsigmoid_backward.default: between(lambda _: (-3.0, 3.0)),
    _aten.hardswish_backward.default: between(lambda _: (-3.0, 3.0)),
    _aten.softshrink_backward.default: between(lambda args: (-args[2], args[2])),
    _aten.hardshrink_backward.default: between(lambda args: (-args[2], args[2])),
    _aten.max_pool2d_with_indices.default: _pooled(2),
    _aten.max_pool3d_with_indices.default: _pooled(3),
    _aten.adaptive_max_pool2d.default: _pooled(2),
    _aten.adaptive_max_pool3d.default: _pooled(3),
    _aten.fractional_max_pool2d.default: _pooled(2),
    _aten.fractional_max_pool3d.default: _pooled(3),
}
"""Operations of which the gradient alone jumps. Those of clamp, abs, max and min compare or take signs backward."""
