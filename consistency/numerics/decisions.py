"""Operations that decide: where a rounding difference may become a jump.

A ReLU's gradient depends on the sign of its operand, a router on an order of scores, a mask on a comparison, a
quantizer on the nearest integer. Each decision rests on an operand and has a *margin*: how far the operand is from
where the decision changes. `DECIDING` lists the operations; `DecisionMode` hands each of them to a watcher, below
autograd, in the forward and in the backward pass.

Of an operation that is continuous, such as ReLU, only the gradient jumps: it is watched where there is a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Force = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One call of an operation that decides.

    Attributes
    ----------
    name : str
        Of the operation.
    operand : torch.Tensor
        The values on which it rests; of a comparison, the difference of both sides.
    decided : torch.Tensor
        What was decided, element by element: a truth value, the number of an interval, an integer; of a selection, the
        indices that were chosen.
    margins : callable
        Return the margin of each element, from the exact operand.
    force : callable
        Return the result of the operation if something else had been decided.
    dim : int or None
        Of a selection, the dimension of the operand that its indices are of.
    """

    name: str
    operand: torch.Tensor
    decided: torch.Tensor
    margins: Callable[[torch.Tensor], torch.Tensor]
    force: Force
    dim: int | None = None


Watch = Callable[[Decision], torch.Tensor | None]
"""Called with each decision; returns what is to be decided instead, None to leave it."""


class DecisionMode(TorchDispatchMode):
    """Hand every decision to a watcher while the mode is active.

    Parameters
    ----------
    watch : callable
    gradient : bool
        Watch also the decisions that a gradient alone depends on.
    """

    def __init__(self, watch: Watch, *, gradient: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._watch = watch
        self._made_by = {**DECIDING, **OF_GRADIENTS} if gradient else DECIDING

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        decide, kwargs = self._made_by.get(func), kwargs or {}
        if decide is None:
            return func(*args, **kwargs)
        found, decision = decide(func, args, kwargs)
        if decision is None:
            return found
        with _disable_current_modes():  # what a watcher computes is not part of the pass, nor in its precision
            wanted = self._watch(decision)
        return found if wanted is None else decision.force(wanted)


Decide = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], tuple[Any, Decision | None]]
"""Call an operation; return its result, and the decision in it where there is one."""


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


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


def _between(kinks: Callable[[tuple[Any, ...]], Sequence[float]], place: int = 1) -> Decide:
    """Return what watches a backward pass whose operand lies in one of several intervals."""

    def decide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        x, ends = args[place], sorted(kinks(args))
        decided = sum((x > end).to(torch.int8) for end in ends)
        assert isinstance(decided, torch.Tensor)

        def margins(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x - end).abs() for end in ends]).amin(0)

        def force(wanted: torch.Tensor) -> Any:
            step = max(1.0, *(abs(end) for end in ends))  # well within the outer intervals
            inside = [ends[0] - step, *((a + b) / 2 for a, b in itertools.pairwise(ends)), ends[-1] + step]
            moved = torch.tensor(inside, dtype=x.dtype, device=x.device)[wanted.long()]
            substituted = torch.where(wanted == decided, x, moved)
            return func(*(substituted if i == place else a for i, a in enumerate(args)), **kwargs)

        name = func._schema.name.partition("::")[2].removesuffix("_backward")
        decision = Decision(name=name, operand=x, decided=decided, margins=margins, force=force)
        return func(*args, **kwargs), decision

    return decide


def _compared(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    found = func(*args, **kwargs)
    a, b = args[:2]
    if a is b or not (_is_real(a) or _is_real(b)) or not isinstance(found, torch.Tensor):
        return found, None
    wide = torch.float64 if torch.float64 in {getattr(a, "dtype", None), getattr(b, "dtype", None)} else torch.float32
    left, right = (v.to(wide) if isinstance(v, torch.Tensor) else v for v in (a, b))
    difference = torch.where(left == right, torch.zeros((), dtype=wide, device=found.device), left - right)  # infinite
    name = func._schema.name.partition("::")[2]
    return found, Decision(name=name, operand=difference, decided=found, margins=torch.abs, force=lambda wanted: wanted)


def _to_next_integer(x: torch.Tensor) -> torch.Tensor:
    return (x - x.round()).abs()


_FROM_BOUNDARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "round": lambda x: 0.5 - _to_next_integer(x),
    "floor": _to_next_integer,
    "ceil": _to_next_integer,
    "trunc": lambda x: torch.where(x.abs() < 0.5, 1 - x.abs(), _to_next_integer(x)),  # none at zero
    "sign": torch.abs,
    "sgn": torch.abs,
}
"""How far a number is from where its rounding changes."""


def _rounded(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    found, x = func(*args, **kwargs), args[0]
    if not _is_real(x):
        return found, None
    name = func._schema.name.partition("::")[2]
    return found, Decision(
        name=name, operand=x, decided=found, margins=_FROM_BOUNDARY[name], force=lambda wanted: wanted.to(found.dtype)
    )


def _cast(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    found, x, dtype = func(*args, **kwargs), args[0], kwargs.get("dtype")
    if not _is_real(x) or dtype is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return found, None
    return found, Decision(
        name="to integer", operand=x, decided=found, margins=_FROM_BOUNDARY["trunc"],
        force=lambda wanted: wanted.to(found.dtype),
    )  # fmt: skip


def _selected(*, values: bool, dim: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], int | None]) -> Decide:
    """Return what watches a choice of elements by their order; `values` are returned before the indices."""

    def decide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        found, x, along = func(*args, **kwargs), args[0], dim(func, args, kwargs)
        if not _is_real(x) or x.dim() == 0:
            return found, None
        indices = found[1] if values else found
        flat, keeps = along is None, indices.dim() == x.dim()
        operand, axis = (x.reshape(-1), 0) if flat else (x, along % x.dim())
        decided = indices.reshape(-1) if flat else indices if keeps else indices.unsqueeze(axis)

        def force(wanted: torch.Tensor) -> Any:
            chosen = wanted.reshape(indices.shape)
            taken = operand.gather(axis, wanted).reshape(indices.shape)
            return type(found)((taken, chosen)) if values else chosen

        name = func._schema.name.partition("::")[2]
        decision = Decision(
            name=name, operand=operand, decided=decided, margins=lambda scores: scores, force=force, dim=axis
        )
        return found, decision

    return decide


def _dim(default: int | None, place: int) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any]], int | None]:
    def dim(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:  # noqa: ARG001 - as any other
        found = kwargs.get("dim", args[place] if len(args) > place else default)
        return None if found is None else int(found)

    return dim


def gaps(scores: torch.Tensor, dim: int, here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the margin of a selection: how far apart in the exact scores the two elements are that were chosen."""
    return (scores.gather(dim, here) - scores.gather(dim, there)).abs()


_aten = torch.ops.aten

_COMPARISONS = (_aten.gt, _aten.ge, _aten.lt, _aten.le, _aten.eq, _aten.ne)
_ROUNDINGS = (_aten.round, _aten.floor, _aten.ceil, _aten.trunc, _aten.sign, _aten.sgn)

DECIDING: dict[Any, Decide] = {
    **{form: _compared for op in _COMPARISONS for form in (op.Scalar, op.Tensor)},
    **{op.default: _rounded for op in _ROUNDINGS},
    _aten._to_copy.default: _cast,
    _aten.topk.default: _selected(values=True, dim=_dim(-1, 2)),
    _aten.sort.default: _selected(values=True, dim=_dim(-1, 1)),
    _aten.sort.stable: _selected(values=True, dim=_dim(-1, 1)),
    _aten.max.dim: _selected(values=True, dim=_dim(None, 1)),
    _aten.min.dim: _selected(values=True, dim=_dim(None, 1)),
    _aten.argmax.default: _selected(values=False, dim=_dim(None, 1)),
    _aten.argmin.default: _selected(values=False, dim=_dim(None, 1)),
}
"""Operations whose result jumps."""

OF_GRADIENTS: dict[Any, Decide] = {
    _aten.relu.default: _relu,
    _aten.relu_.default: _relu,
    _aten.leaky_relu_backward.default: _between(lambda _: (0.0,)),
    _aten.hardtanh_backward.default: _between(lambda args: (float(args[2]), float(args[3]))),
    _aten.hardsigmoid_backward.default: _between(lambda _: (-3.0, 3.0)),
    _aten.hardswish_backward.default: _between(lambda _: (-3.0, 3.0)),
}
"""Operations of which the gradient alone jumps. Those of clamp, abs, max and min compare or take signs backward."""
