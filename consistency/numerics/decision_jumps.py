"""Decisions by comparison, rounding and order: the result itself jumps.

Forms that write into their operand (`round_`, `gt_`) decide as the others do. Kernels that round inside, such as those
of fake quantization, are not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from consistency.numerics.decision import Decide, Decision, in_place, is_real, name_of
from consistency.numerics.decision_kinks import between

_aten = torch.ops.aten


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
        name="round", operand=x * unit, decided=(found * unit).round(), margins=_FROM_BOUNDARY["round"],
        force=lambda wanted: (wanted / unit).to(found.dtype),
    )  # fmt: skip


def _divided(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    """A quotient that is rounded to an integer."""
    found, mode = func(*args, **kwargs), kwargs.get("rounding_mode", "floor")
    if mode is None or not is_real(found):
        return found, None
    return found, Decision(
        name=name_of(func), operand=args[0] / args[1], decided=found, margins=_FROM_BOUNDARY[mode],
        force=lambda wanted: wanted.to(found.dtype),
    )  # fmt: skip


def _remaining(mode: str) -> Decide:
    """Return what watches the rest of a division, which jumps where the quotient is an integer."""

    def decide(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        found, x, by = func(*args, **kwargs), args[0], args[1] if len(args) > 1 else 1
        if not is_real(found):
            return found, None
        return found, Decision(
            name=name_of(func), operand=x / by, decided=((x - found) / by).round(), margins=_FROM_BOUNDARY[mode],
            force=lambda wanted: x - wanted.to(found.dtype) * by,
        )  # fmt: skip

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
        name="to integer", operand=x, decided=found, margins=_FROM_BOUNDARY["trunc"],
        force=lambda wanted: wanted.to(found.dtype),
    )  # fmt: skip


def _copied(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
    """Numbers that are written into a tensor of integers."""
    found, x = func(*args, **kwargs), args[1]
    if not is_real(x) or found.is_floating_point() or found.is_complex() or found.dtype is torch.bool:
        return found, None
    return found, Decision(
        name="to integer", operand=x.expand(found.shape), decided=found.clone(), margins=_FROM_BOUNDARY["trunc"],
        force=lambda wanted: found.copy_(wanted),
    )  # fmt: skip


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
"""Operations whose result jumps."""
