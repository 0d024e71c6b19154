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
from torch.utils._python_dispatch import _disable_current_modes

from consistency.numerics.decision import Decide, Decision, in_place, is_real, name_of
from consistency.numerics.dispatch_mode import DispatchMode

Watch = Callable[[Decision], torch.Tensor | None]
"""Called with each decision; returns the outcome to force instead, None to leave it."""

Decided = tuple[Any, Decision | None]
"""The result of an operation, and the decision in it; None where there is none."""

Arguments = tuple[Any, ...]


class DecisionMode(DispatchMode):
    """Hand every decision to a watcher while the mode is active.

    Parameters
    ----------
    watch : callable
        Called with each decision; what it returns, if not None, is decided instead.
    gradient : bool
        Watch also the decisions that a gradient alone depends on.
    """

    def __init__(self, watch: Watch, *, gradient: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._watch = watch
        self._deciders = {**DECIDING, **OF_GRADIENTS} if gradient else DECIDING

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        decide, kwargs = self._deciders.get(func), kwargs or {}
        if decide is None:
            return func(*args, **kwargs)
        result, decision = decide(func, args, kwargs)
        if decision is None:
            return result
        with _disable_current_modes():  # what a watcher computes is not part of the pass, nor in its precision
            forced = self._watch(decision)
        return result if forced is None else decision.force(forced)


TO_INTEGER = "to integer"
"""The name of a cast of a float to an integer, which cuts off the digits behind the point."""

_aten = torch.ops.aten


def _relu(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
    """Watch ReLU by its result: autograd keeps that, and lets the gradient through where it is positive."""
    is_in_place = func is _aten.relu_.default
    x = args[0].clone() if is_in_place else args[0]
    result = func(*args, **kwargs)

    def force(wanted: torch.Tensor) -> Any:
        # the smallest number that no unit flushes to zero: the result changes by no more than the error of the operand
        closed = result.masked_fill(~wanted, 0)
        changed = closed.masked_fill(wanted & ~(closed > 0), torch.finfo(result.dtype).tiny)
        return result.copy_(changed) if is_in_place else changed

    return result, Decision(name="relu", operand=x, decided=x > 0, margins=torch.abs, force=force)


def between(kinks: Callable[[Arguments], Sequence[float]], place: int = 1) -> Decide:
    """Return the watcher of an operation whose operand lies in one of several intervals.

    Parameters
    ----------
    kinks : callable
        Returns from the arguments where the intervals meet; where it returns none, the operation decides nothing.
    place : int
        Where the operand is among the arguments.
    """

    def decide(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
        x, ends = args[place], sorted(float(end) for end in kinks(args))
        if not ends:  # with these arguments the operation has no jump
            return func(*args, **kwargs), None
        # the number of the interval is the number of ends below
        decided = sum((x > end).to(torch.int8) for end in ends)
        assert isinstance(decided, torch.Tensor)

        def margins(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x - end).abs() for end in ends]).amin(0)

        def force(wanted: torch.Tensor) -> Any:
            # just across the nearest end of the wanted interval: within it the result depends on the operand too
            up, down = (_numbers_of_intervals(side, wanted, like=x) for side in _sides_of(ends, x.dtype))
            moved = torch.where(wanted > decided, up, down)
            substituted = torch.where(wanted == decided, x, moved)
            return func(*args[:place], substituted, *args[place + 1 :], **kwargs)

        name = name_of(func).removesuffix("_backward")
        decision = Decision(name=name, operand=x, decided=decided, margins=margins, force=force)
        return func(*args, **kwargs), decision

    return decide


def _sides_of(ends: Sequence[float], dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Return for each interval between ends the number just above its lower end, and the one just below its upper end.

    The first interval has no lower end and the last no upper one. The end that they have stands in its place, and is
    never taken: nothing is moved up into the first interval, nor down into the last.
    """
    info = torch.finfo(dtype)
    steps = [max(abs(end) * info.eps, info.tiny) for end in ends]
    above = [ends[0], *(end + step for end, step in zip(ends, steps, strict=True))]
    below = [*(end - step for end, step in zip(ends, steps, strict=True)), ends[-1]]
    return above, below


def _numbers_of_intervals(numbers: list[float], intervals: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return the number of each element's interval."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[intervals.long()]


def _pooled(dims: int) -> Decide:
    """Return the watcher of the maximum of each window; its index counts through the last `dims` dimensions."""

    def decide(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
        result, x = func(*args, **kwargs), args[0]
        if not is_real(x):
            return result, None
        values, indices = result
        lead = x.shape[: x.dim() - dims]
        operand, decided = x.reshape(*lead, -1), indices.reshape(*lead, -1)

        def force(wanted: torch.Tensor) -> Any:
            return type(result)((operand.gather(-1, wanted).reshape(values.shape), wanted.reshape(indices.shape)))

        decision = Decision(
            name=name_of(func).removesuffix("_with_indices"),
            operand=operand,
            decided=decided,
            margins=lambda scores: scores,
            force=force,
            dim=len(lead),
            scores=2,
        )
        return result, decision

    return decide


def _elu_kink(args: Arguments) -> tuple[float, ...]:
    """Return where the gradient of ELU jumps, from the arguments of its backward pass.

    Both sides meet where the slope of the exponential at 0 is that of the line, as in ELU with alpha 1 and CELU.
    """
    return () if math.isclose(args[1] * args[3], 1) else (0.0,)


def _threshold_kink(args: Arguments) -> tuple[float, ...]:
    """Return where the gradient of `threshold` jumps; at 0 the operation is that of ReLU, whose result is watched."""
    return (args[2],) if args[2] != 0 else ()


OF_GRADIENTS: dict[Any, Decide] = {
    _aten.relu.default: _relu,
    _aten.relu_.default: _relu,
    _aten.leaky_relu_backward.default: between(lambda _: (0.0,)),
    _aten._prelu_kernel_backward.default: between(lambda _: (0.0,)),
    _aten.elu_backward.default: between(_elu_kink, 5),
    _aten.threshold_backward.default: between(_threshold_kink),
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
"""Operations whose gradient alone jumps: intervals and windows. The gradients of clamp, abs, max and min compare or
take signs in the backward pass, which `DECIDING` has; the backward pass of `threshold` at exactly 0 is computed by the
operation of ReLU's."""


def _compared(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
    """Watch a comparison by the difference of both sides."""
    result = func(*args, **kwargs)
    a, b = args[:2]
    is_decision = a is not b and (is_real(a) or is_real(b)) and isinstance(result, torch.Tensor)
    if not is_decision:
        return result, None
    has_float64 = any(getattr(side, "dtype", None) == torch.float64 for side in (a, b))
    wide = torch.float64 if has_float64 else torch.float32
    left = a.to(wide) if isinstance(a, torch.Tensor) else a
    right = b.to(wide) if isinstance(b, torch.Tensor) else b
    # two equal infinities have no difference, where the subtraction gives NaN
    difference = torch.where(left == right, torch.zeros((), dtype=wide, device=result.device), left - right)
    decision = Decision(
        name=name_of(func), operand=difference, decided=result, margins=torch.abs, force=lambda wanted: wanted
    )
    return result, decision


def _to_next_integer(x: torch.Tensor) -> torch.Tensor:
    """Return the distance of each number to the nearest integer."""
    return (x - x.round()).abs()


_DISTANCE_TO_CHANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "round": lambda x: 0.5 - _to_next_integer(x),
    "floor": _to_next_integer,
    "ceil": _to_next_integer,
    "trunc": lambda x: torch.where(x.abs() < 0.5, 1 - x.abs(), _to_next_integer(x)),  # none at zero
    "sign": torch.abs,
    "sgn": torch.abs,
    "signbit": torch.abs,
    "heaviside": torch.abs,
}
"""Functions that return how far each number is from where its rounding changes, by the name of the operation."""


def _rounded(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
    """Watch a function that rounds to an integer, or to a sign."""
    result, x = func(*args, **kwargs), args[0]
    if not is_real(x):
        return result, None
    name = name_of(func)
    return result, Decision(
        name=name,
        operand=x,
        decided=result,
        margins=_DISTANCE_TO_CHANGE[name],
        force=lambda wanted: wanted.to(result.dtype),
    )


def _rounded_to_decimals(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
    """Watch `round` to a number of decimals, in units of the last one."""
    result, x, unit = func(*args, **kwargs), args[0], 10.0 ** kwargs["decimals"]
    if not is_real(x):
        return result, None
    return result, Decision(
        name="round",
        operand=x * unit,
        decided=(result * unit).round(),
        margins=_DISTANCE_TO_CHANGE["round"],
        force=lambda wanted: (wanted / unit).to(result.dtype),
    )


def _divided(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
    """Watch a quotient that is rounded to an integer."""
    result, mode = func(*args, **kwargs), kwargs.get("rounding_mode", "floor")
    if mode is None or not is_real(result):
        return result, None
    return result, Decision(
        name=name_of(func),
        operand=args[0] / args[1],
        decided=result,
        margins=_DISTANCE_TO_CHANGE[mode],
        force=lambda wanted: wanted.to(result.dtype),
    )


def _remaining(mode: str) -> Decide:
    """Return the watcher of the remainder of a division, which jumps where the quotient is an integer."""

    def decide(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
        result, x = func(*args, **kwargs), args[0]
        divisor = args[1] if len(args) > 1 else 1  # `frac` has none
        if not is_real(result):
            return result, None
        return result, Decision(
            name=name_of(func),
            operand=x / divisor,
            decided=((x - result) / divisor).round(),
            margins=_DISTANCE_TO_CHANGE[mode],
            force=lambda wanted: x - wanted.to(result.dtype) * divisor,
        )

    return decide


def _sorted_into(x_at: int, boundaries_at: int) -> Decide:
    """Return the watcher of a choice of buckets, by where numbers and boundaries are among the arguments."""

    def decide(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
        result, x, ends = func(*args, **kwargs), args[x_at], args[boundaries_at]
        if not is_real(x) or ends.dim() != 1 or not ends.numel():
            return result, None

        def margins(x: torch.Tensor) -> torch.Tensor:
            boundaries = ends.to(x.device, x.dtype)
            after = torch.searchsorted(boundaries, x.contiguous())
            neighbours = [boundaries[index.clamp(0, len(boundaries) - 1)] for index in (after - 1, after)]
            return torch.stack([(x - end).abs() for end in neighbours]).amin(0)

        return result, Decision(
            name=name_of(func), operand=x, decided=result, margins=margins, force=lambda wanted: wanted.to(result.dtype)
        )

    return decide


def _cast(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
    """Watch a conversion of floats to integers."""
    result, x, dtype = func(*args, **kwargs), args[0], kwargs.get("dtype")
    if not is_real(x) or dtype is None or not _is_integer(dtype):
        return result, None
    return result, Decision(
        name=TO_INTEGER,
        operand=x,
        decided=result,
        margins=_DISTANCE_TO_CHANGE["trunc"],
        force=lambda wanted: wanted.to(result.dtype),
    )


def _copied(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
    """Watch floats that are written into a tensor of integers."""
    result, x = func(*args, **kwargs), args[1]
    if not is_real(x) or not _is_integer(result.dtype):
        return result, None
    return result, Decision(
        name=TO_INTEGER,
        operand=x.expand(result.shape),
        decided=result.clone(),
        margins=_DISTANCE_TO_CHANGE["trunc"],
        force=lambda wanted: result.copy_(wanted),
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


DimensionOf = Callable[[Any, Arguments, Mapping[str, Any]], int | None]
"""Return the dimension along which an operation selects, from the operation and its arguments; None for all of them."""


def _selected(*, values: bool, dim: DimensionOf) -> Decide:
    """Return the watcher of a choice of elements by their order.

    Parameters
    ----------
    values : bool
        Whether the operation returns the chosen values before their indices.
    dim : callable
        Returns the dimension along which it chooses.
    """

    def decide(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
        result, x, dimension = func(*args, **kwargs), args[0], dim(func, args, kwargs)
        # a single number is chosen whatever it is
        if not is_real(x) or x.dim() == 0:
            return result, None
        indices = result[1] if values else result
        if dimension is None:
            operand, axis = x.reshape(-1), 0
            decided = indices.reshape(-1)
        else:
            operand, axis = x, dimension % x.dim()
            # without keepdim the result has one dimension less than the operand
            decided = indices if indices.dim() == x.dim() else indices.unsqueeze(axis)

        def force(wanted: torch.Tensor) -> Any:
            forced_indices = wanted.reshape(indices.shape)
            forced_values = operand.gather(axis, wanted).reshape(indices.shape)
            return type(result)((forced_values, forced_indices)) if values else forced_indices

        decision = Decision(
            name=name_of(func),
            operand=operand,
            decided=decided,
            margins=lambda scores: scores,
            force=force,
            dim=axis,
            scores=2,
        )
        return result, decision

    return decide


def _dim(default: int | None, place: int) -> DimensionOf:
    """Return a function that reads the dimension from the arguments: `dim`, the one at `place`, or the default."""

    def dim(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> int | None:  # noqa: ARG001 - as any other
        positional = args[place] if len(args) > place else default
        dimension = kwargs.get("dim", positional)
        return None if dimension is None else int(dimension)

    return dim


_in_order = _selected(values=True, dim=_dim(-1, 2))


def _largest(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Decided:
    """Watch `topk`; with `sorted=False`, which promises no order, the decision is the set of elements.

    CPU and CUDA return one set in two orders. A set is a mask over the scores, and the margin of an element is its
    distance from the first score on the other side: for it to change sides, two scores have to be off by that together.
    """
    named_args = {**dict(zip(("self", "k", "dim", "largest", "sorted"), args, strict=False)), **kwargs}
    x = named_args["self"]
    # in order, the indices themselves are the decision, as those of a sort are
    if named_args.get("sorted", True) or not is_real(x) or x.dim() == 0:
        return _in_order(func, args, kwargs)
    result, axis = func(*args, **kwargs), named_args.get("dim", -1) % x.dim()
    sign = 1 if named_args.get("largest", True) else -1
    count = named_args["k"]
    is_chosen = torch.zeros(x.shape, dtype=torch.bool, device=x.device).scatter_(axis, result[1], True)

    def margins(scores: torch.Tensor) -> torch.Tensor:
        signed = sign * scores
        if count in (0, scores.shape[axis]):  # there is no other side
            return torch.full_like(scores, torch.inf)
        last_in, first_out = signed.topk(count + 1, dim=axis).values.narrow(axis, count - 1, 2).unbind(axis)
        last_in, first_out = last_in.unsqueeze(axis), first_out.unsqueeze(axis)
        distances = torch.where(signed >= last_in, signed - first_out, last_in - signed)
        # of equal scores, as masked ones are, any may be chosen: infinity minus infinity is no distance
        return distances.nan_to_num(nan=0.0, posinf=torch.inf).abs()

    def force(wanted: torch.Tensor) -> Any:
        last_axis_shape = result[1].movedim(axis, -1).shape
        indices = wanted.movedim(axis, -1).nonzero()[:, -1].reshape(*last_axis_shape).movedim(-1, axis)
        return type(result)((x.gather(axis, indices), indices))

    return result, Decision(name=name_of(func), operand=x, decided=is_chosen, margins=margins, force=force, scores=2)


_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_ROUNDINGS = ("round", "floor", "ceil", "trunc", "sign", "sgn", "signbit", "heaviside")


def _both_forms(name: str, overload: str, decide: Decide) -> dict[Any, Decide]:
    """Return an operation's entries: plain, and where torch has it the form that writes into its operand."""
    plain = getattr(getattr(_aten, name), overload)
    entries = {plain: decide}
    if overload in dir(getattr(_aten, f"{name}_", None)):
        entries[getattr(getattr(_aten, f"{name}_"), overload)] = in_place(decide, plain)
    return entries


def _all_forms(names: Sequence[str], overloads: Sequence[str], decide: Decide) -> dict[Any, Decide]:
    """Return the entries of several operations with several overloads, all with one watcher."""
    entries: dict[Any, Decide] = {}
    for name in names:
        for overload in overloads:
            entries |= _both_forms(name, overload, decide)
    return entries


def _threshold(args: Arguments) -> tuple[float, ...]:
    """Return where `threshold` jumps: nowhere if smaller numbers become the threshold itself."""
    return () if args[1] == args[2] else (args[1],)


def _shrink(args: Arguments) -> tuple[float, ...]:
    """Return where `hardshrink` jumps."""
    limit = float(args[1]) if len(args) > 1 else 0.5  # torch's default
    return -limit, limit


DECIDING: dict[Any, Decide] = {
    **_all_forms(_COMPARISONS, ("Scalar", "Tensor"), _compared),
    **_all_forms(_ROUNDINGS, ("default",), _rounded),
    **_both_forms("round", "decimals", _rounded_to_decimals),
    **_all_forms(("div",), ("Tensor_mode", "Scalar_mode"), _divided),
    **_all_forms(("floor_divide",), ("default", "Scalar"), _divided),
    **_all_forms(("remainder",), ("Tensor", "Scalar"), _remaining("floor")),
    **_all_forms(("fmod",), ("Tensor", "Scalar"), _remaining("trunc")),
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
"""Operations whose result jumps: comparison, rounding and order. Kernels that round inside, as fake quantization does,
are not listed."""
