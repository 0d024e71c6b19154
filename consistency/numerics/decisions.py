"""Watch the operations that decide: where a rounding difference may become a jump.

A ReLU's gradient depends on the sign of its operand, a router on an order of scores, a mask on a comparison, a
quantizer on the nearest integer. Each decision rests on an operand and has a *margin*: how far the operand is from
where the decision changes. `DecisionMode` hands each of them to a watcher, below autograd, in the forward and in the
backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from consistency.numerics.decision import Decide, Decision, in_place, is_real, name_of

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


TO_INTEGER = "to integer"
"""The name of a cast that cuts off what is behind the point."""

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
            name=name_of(func).removesuffix("_with_indices"),
            operand=operand,
            decided=decided,
            margins=lambda scores: scores,
            force=force,
            dim=len(lead),
            scores=2,
        )
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
"""Operations of which the gradient alone jumps: intervals and windows. Those of clamp, abs, max and min compare or take
signs backward; the backward pass of `threshold` at exactly 0 is computed by the operation of ReLU's."""


def _compared(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    found = func(*args, **kwargs)
    a, b = args[:2]
    if a is b or not (is_real(a) or is_real(b)) or not isinstance(found, torch.Tensor):
        return found, None
    wide = torch.float64 if torch.float64 in {getattr(a, "dtype", None), getattr(b, "dtype", None)} else torch.float32
    left, right = (v.to(wide) if isinstance(v, torch.Tensor) else v for v in (a, b))
    difference = torch.where(left == right, torch.zeros((), dtype=wide, device=found.device), left - right)  # infinite
    name = name_of(func)
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
    "signbit": torch.abs,
    "heaviside": torch.abs,
}
"""How far a number is from where its rounding changes."""


def _rounded(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    found, x = func(*args, **kwargs), args[0]
    if not is_real(x):
        return found, None
    name = name_of(func)
    return found, Decision(
        name=name, operand=x, decided=found, margins=_FROM_BOUNDARY[name], force=lambda wanted: wanted.to(found.dtype)
    )


def _rounded_to_decimals(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    found, x, unit = func(*args, **kwargs), args[0], 10.0 ** kwargs["decimals"]
    if not is_real(x):
        return found, None
    return found, Decision(
        name="round",
        operand=x * unit,
        decided=(found * unit).round(),
        margins=_FROM_BOUNDARY["round"],
        force=lambda wanted: (wanted / unit).to(found.dtype),
    )


def _divided(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    """A quotient that is rounded to an integer."""
    found, mode = func(*args, **kwargs), kwargs.get("rounding_mode", "floor")
    if mode is None or not is_real(found):
        return found, None
    return found, Decision(
        name=name_of(func),
        operand=args[0] / args[1],
        decided=found,
        margins=_FROM_BOUNDARY[mode],
        force=lambda wanted: wanted.to(found.dtype),
    )


def _remaining(mode: str) -> Decide:
    """Return what watches the rest of a division, which jumps where the quotient is an integer."""

    def decide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        found, x, by = func(*args, **kwargs), args[0], args[1] if len(args) > 1 else 1
        if not is_real(found):
            return found, None
        return found, Decision(
            name=name_of(func),
            operand=x / by,
            decided=((x - found) / by).round(),
            margins=_FROM_BOUNDARY[mode],
            force=lambda wanted: x - wanted.to(found.dtype) * by,
        )

    return decide


def _sorted_into(x_at: int, boundaries_at: int) -> Decide:
    """Return what watches the choice of a bucket."""

    def decide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        found, x, ends = func(*args, **kwargs), args[x_at], args[boundaries_at]
        if not is_real(x) or ends.dim() != 1 or not ends.numel():
            return found, None

        def margins(x: torch.Tensor) -> torch.Tensor:
            held = ends.to(x.device, x.dtype)
            after = torch.searchsorted(held, x.contiguous())
            near = [held[place.clamp(0, len(held) - 1)] for place in (after - 1, after)]
            return torch.stack([(x - end).abs() for end in near]).amin(0)

        return found, Decision(
            name=name_of(func), operand=x, decided=found, margins=margins, force=lambda wanted: wanted.to(found.dtype)
        )

    return decide


def _cast(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    found, x, dtype = func(*args, **kwargs), args[0], kwargs.get("dtype")
    if not is_real(x) or dtype is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return found, None
    return found, Decision(
        name=TO_INTEGER,
        operand=x,
        decided=found,
        margins=_FROM_BOUNDARY["trunc"],
        force=lambda wanted: wanted.to(found.dtype),
    )


def _copied(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    """Numbers that are written into a tensor of integers."""
    found, x = func(*args, **kwargs), args[1]
    if not is_real(x) or found.is_floating_point() or found.is_complex() or found.dtype is torch.bool:
        return found, None
    return found, Decision(
        name=TO_INTEGER,
        operand=x.expand(found.shape),
        decided=found.clone(),
        margins=_FROM_BOUNDARY["trunc"],
        force=lambda wanted: found.copy_(wanted),
    )


def _selected(*, values: bool, dim: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], int | None]) -> Decide:
    """Return what watches a choice of elements by their order; `values` are returned before the indices."""

    def decide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        found, x, along = func(*args, **kwargs), args[0], dim(func, args, kwargs)
        if not is_real(x) or x.dim() == 0:
            return found, None
        indices = found[1] if values else found
        flat, keeps = along is None, indices.dim() == x.dim()
        operand, axis = (x.reshape(-1), 0) if flat else (x, along % x.dim())
        decided = indices.reshape(-1) if flat else indices if keeps else indices.unsqueeze(axis)

        def force(wanted: torch.Tensor) -> Any:
            chosen = wanted.reshape(indices.shape)
            taken = operand.gather(axis, wanted).reshape(indices.shape)
            return type(found)((taken, chosen)) if values else chosen

        name = name_of(func)
        decision = Decision(
            name=name, operand=operand, decided=decided, margins=lambda scores: scores, force=force, dim=axis, scores=2
        )
        return found, decision

    return decide


_in_order = _selected(values=True, dim=lambda _, args, kwargs: int(kwargs.get("dim", args[2] if len(args) > 2 else -1)))


def _largest(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    """Watch `topk`. Without an order, which `sorted=False` does not promise, the set is what was decided.

    CPU and CUDA return one set in two orders. A set is a mask over the scores, and the margin of an element is its
    distance from the first score on the other side: for it to change sides, two scores have to be off by that together.
    """
    given = {**dict(zip(("self", "k", "dim", "largest", "sorted"), args, strict=False)), **kwargs}
    x = given["self"]
    if given.get("sorted", True) or not is_real(x) or x.dim() == 0:
        return _in_order(func, args, kwargs)
    found, axis = func(*args, **kwargs), given.get("dim", -1) % x.dim()
    sign, count = 1 if given.get("largest", True) else -1, given["k"]
    chosen = torch.zeros(x.shape, dtype=torch.bool, device=x.device).scatter_(axis, found[1], True)

    def margins(scores: torch.Tensor) -> torch.Tensor:
        signed = sign * scores
        if count in (0, scores.shape[axis]):
            return torch.full_like(scores, torch.inf)
        last, first = signed.topk(count + 1, dim=axis).values.narrow(axis, count - 1, 2).unbind(axis)
        last, first = last.unsqueeze(axis), first.unsqueeze(axis)
        # of equal scores, as masked ones are, any may be chosen
        return torch.where(signed >= last, signed - first, last - signed).nan_to_num(nan=0.0, posinf=torch.inf).abs()

    def force(wanted: torch.Tensor) -> Any:
        places = wanted.movedim(axis, -1).nonzero()[:, -1].reshape(*found[1].movedim(axis, -1).shape)
        indices = places.movedim(-1, axis)
        return type(found)((x.gather(axis, indices), indices))

    return found, Decision(name=name_of(func), operand=x, decided=chosen, margins=margins, force=force, scores=2)


def _dim(default: int | None, place: int) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any]], int | None]:
    def dim(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:  # noqa: ARG001 - as any other
        found = kwargs.get("dim", args[place] if len(args) > place else default)
        return None if found is None else int(found)

    return dim


_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_ROUNDINGS = ("round", "floor", "ceil", "trunc", "sign", "sgn", "signbit", "heaviside")


def _both_forms(name: str, overload: str, decide: Decide) -> dict[Any, Decide]:
    """Return an operation's entries: plain, and where torch has it the form that writes into its operand."""
    plain = getattr(getattr(_aten, name), overload)
    found = {plain: decide}
    if overload in dir(getattr(_aten, f"{name}_", None)):
        found[getattr(getattr(_aten, f"{name}_"), overload)] = in_place(decide, plain)
    return found


def _threshold(args: tuple[Any, ...]) -> tuple[float, ...]:
    return () if args[1] == args[2] else (args[1],)


def _shrink(args: tuple[Any, ...]) -> tuple[float, ...]:
    limit = float(args[1]) if len(args) > 1 else 0.5  # torch's default
    return -limit, limit


DECIDING: dict[Any, Decide] = {
    **{op: d for n in _COMPARISONS for o in ("Scalar", "Tensor") for op, d in _both_forms(n, o, _compared).items()},
    **{op: d for name in _ROUNDINGS for op, d in _both_forms(name, "default", _rounded).items()},
    **_both_forms("round", "decimals", _rounded_to_decimals),
    **_both_forms("div", "Tensor_mode", _divided),
    **_both_forms("div", "Scalar_mode", _divided),
    **_both_forms("floor_divide", "default", _divided),
    **_both_forms("floor_divide", "Scalar", _divided),
    **{op: d for o in ("Tensor", "Scalar") for op, d in _both_forms("remainder", o, _remaining("floor")).items()},
    **{op: d for o in ("Tensor", "Scalar") for op, d in _both_forms("fmod", o, _remaining("trunc")).items()},
    **_both_forms("frac", "default", _remaining("trunc")),
    **_both_forms("threshold", "default", between(_threshold, 0)),
    _aten.hardshrink.default: between(_shrink, 0),
    _aten.bucketize.Tensor: _sorted_into(0, 1),
    _aten.searchsorted.Tensor: _sorted_into(1, 0),
    _aten._to_copy.default: _cast,
    _aten.copy_.default: _copied,
    _aten.topk.default: _largest,
    _aten.sort.default: _selected(values=True, dim=_dim(-1, 1)),
    _aten.sort.stable: _selected(values=True, dim=_dim(-1, 1)),
    _aten.max.dim: _selected(values=True, dim=_dim(None, 1)),
    _aten.min.dim: _selected(values=True, dim=_dim(None, 1)),
    _aten.median.dim: _selected(values=True, dim=_dim(None, 1)),
    _aten.kthvalue.default: _selected(values=True, dim=_dim(-1, 2)),
    _aten.cummax.default: _selected(values=True, dim=_dim(None, 1)),
    _aten.cummin.default: _selected(values=True, dim=_dim(None, 1)),
    _aten.argmax.default: _selected(values=False, dim=_dim(None, 1)),
    _aten.argmin.default: _selected(values=False, dim=_dim(None, 1)),
}
"""Operations whose result jumps: comparison, rounding and order. Kernels that round inside, such as those of fake
quantization, are not listed."""
