"""Calls of ATen's operations as text, one a line: read them, run them on a device, and find the operation that is off.

    v1 = aten.t.default(in2_weight)
    v2 = aten.mm.default(in1, v1)
    return v2

`here` is the device they run on, and `host` the CPU. A reproducer holds a copy of this file, so it needs torch alone.
Its text may be a stranger's: it is parsed, not evaluated, and holds nothing but operations of ATen on tensors, numbers
and dtypes; none that takes a file's name, changes what memory a tensor has, or is private and not in `_PRIVATE`.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_CALLS, MOST_CHARACTERS = 2_000, 4_096
"""Of one text, and of one line: a block of experts in a loop has some hundred calls."""

_PRIVATE = frozenset({
    "_to_copy", "_unsafe_view", "_reshape_alias", "_softmax", "_log_softmax", "_fused_rms_norm", "_safe_softmax",
    "_native_batch_norm_legit_no_training", "_adaptive_avg_pool2d", "_native_multi_head_attention", "_grouped_mm",
    "_softmax_backward_data", "_log_softmax_backward_data", "_fused_rms_norm_backward",
})  # fmt: skip
_ATTENTION = "_scaled_dot_product_"
_REFUSED = re.compile(r"set_|.*resize.*|from_file|record_stream|.*storage.*")
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Products of two matrices, and where the first is among their arguments."""
_TRIED = 6
"""Operations, and calls of one, that are looked at for a cause: each takes a run of all calls."""

_WORDS = ("none", "tanh", "floor", "trunc")
"""Values of options that are texts: how GELU is approximated, how a quotient is rounded."""

_WIDE = torch.float64
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class CallsError(ValueError):
    """The text is not of the form that is described above."""


class Name(str):
    """A tensor among the arguments of a call."""

    __slots__ = ()


@dataclass(frozen=True)
class AtenCall:
    """One call: `results` has a name for each tensor that it returns; devices are the names `here` and `host`."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str, ...]

    def __str__(self) -> str:
        given = [*map(_text, self.args), *(f"{name}={_text(value)}" for name, value in self.kwargs.items())]
        return f"{', '.join(self.results)} = {self.operation}({', '.join(given)})"


Tensors = Mapping[str, torch.Tensor]


def allowed_operation(operation: Any) -> bool:
    """Report whether a text may call an operation."""
    if not isinstance(operation, torch._ops.OpOverload) or operation.namespace != "aten":
        return False
    name, schema = operation.overloadpacket.__name__, operation._schema
    if name.startswith("_") and not name.startswith(("__", _ATTENTION)) and name not in _PRIVATE:
        return False
    is_named = any(str(one.type) == "str" and not one.has_default_value() for one in schema.arguments)
    returns = all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema.returns)
    return bool(schema.returns) and returns and not is_named and not _REFUSED.fullmatch(name)


def read_calls(text: str, inputs: Collection[str]) -> tuple[list[AtenCall], str]:
    """Return the calls of a text, and the name of its result.

    Raises
    ------
    CallsError
    """
    known, calls = set(inputs), list[AtenCall]()
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        try:
            node = ast.parse(line).body[0] if len(line) <= MOST_CHARACTERS else None
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id in known:
                return calls, node.value.id
            if not isinstance(node, ast.Assign) or len(node.targets) != 1 or len(calls) == MOST_CALLS:
                raise CallsError(f"not a call of ATen: {line[:80]!r}")
            calls.append(_call(node, known))
        except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError) as error:
            raise CallsError(f"not a call of ATen: {line[:80]!r}") from error
        known.update(calls[-1].results)
    raise CallsError("no result is named")


def _call(node: ast.Assign, known: Collection[str]) -> AtenCall:
    target, call = node.targets[0], node.value
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    if not isinstance(call, ast.Call) or not all(isinstance(name, ast.Name) for name in names):
        raise CallsError("not one call")
    match call.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="aten"), attr=name), attr=overload):
            operation = getattr(getattr(torch.ops.aten, name, None), overload, None)
        case _:
            operation = None
    if not allowed_operation(operation) or any(keyword.arg is None for keyword in call.keywords):
        raise CallsError("no operation that may be called")
    return AtenCall(
        operation=operation,
        args=tuple(_value(one, known) for one in call.args),
        kwargs={str(one.arg): _value(one.value, known) for one in call.keywords},
        results=tuple(name.id for name in names if isinstance(name, ast.Name)),
    )


def _value(node: ast.expr, known: Collection[str]) -> Any:
    match node:
        case ast.Constant(value=None | bool() | float() as value):
            return value
        case ast.Constant(value=int() as value) if value < 1 << 63:
            return value
        case ast.Constant(value=str() as value) if value in _WORDS:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name() as operand):
            value = _value(operand, known)
            if type(value) in (int, float):
                return -value
        case ast.List(elts=elements):
            return [_value(one, known) for one in elements]
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Name(id="here" | "host" as name):
            return torch.device("meta" if name == "here" else "cpu")
        case ast.Name(id=name) if name in known:
            return Name(name)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
                return value
    raise CallsError("not an argument")


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, torch.device):  # where a trace has put the device that it was made on
        return "here" if value.type == "meta" else "host"
    is_known = value is None or isinstance(value, Name | bool | int | float | torch.dtype | torch.layout)
    if not (is_known or isinstance(value, torch.memory_format) or value in _WORDS):
        raise CallsError(f"not an argument: {value!r}")
    return str(value) if isinstance(value, Name | float) else repr(value)


def run_calls(
    calls: Sequence[AtenCall],
    inputs: Tensors,
    device: Any,
    exactly: Collection[int] = (),
    errors: dict[int, float] | None = None,
) -> dict[str, torch.Tensor]:
    """Run calls on a device, those whose numbers are in `exactly` in float64 with results rounded; return all tensors.

    Inputs whose names begin with `host` stay on the CPU. `errors` gets how far each call by itself is from float64,
    relative to its values and in roundings of its dtype.
    """
    values = {name: one.to("cpu" if name.startswith("host") else device, copy=True) for name, one in inputs.items()}
    for number, call in enumerate(calls):
        args, kwargs = _given((call.args, call.kwargs), lambda name: values[name], torch.device(device))
        is_wanted = not call.operation.is_view and (errors is not None or number in exactly)
        wide = _wide_results(call.operation, args, kwargs) if is_wanted else []
        found = _results(call.operation, args, kwargs)
        for one, exact in zip(found, wide, strict=False):
            if one.is_floating_point() and errors is not None:
                own = one.to("cpu", _WIDE)
                error = torch.where(own == exact, 0.0, own - exact).norm().nan_to_num(torch.inf, torch.inf)
                size = exact.nan_to_num(0.0, 0.0, 0.0).norm() * torch.finfo(one.dtype).eps
                errors[number] = float(error / size.clamp_min(1e-300))
                break
            if one.is_floating_point():
                one.copy_(exact)
        values.update(zip(call.results, found, strict=False))
    return values


def run_exactly(calls: Sequence[AtenCall], inputs: Tensors) -> dict[str, torch.Tensor]:
    """Run calls in float64 on the CPU, without rounding in between; return all tensors."""
    values = {name: _widened(one).clone() for name, one in inputs.items()}
    for call in calls:
        args, kwargs = _given((call.args, call.kwargs), lambda name: values[name], torch.device("cpu"))
        values.update(zip(call.results, _wide_results(call.operation, args, kwargs), strict=False))
    return values


def each(found: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation returns."""
    return [found] if isinstance(found, torch.Tensor) else [one for one in found if isinstance(one, torch.Tensor)]


def _given(value: Any, of: Callable[[Name], Any], here: torch.device) -> Any:
    """Return a value with tensors in place of their names."""
    if isinstance(value, Name):
        return of(value)
    if isinstance(value, torch.device):
        return here if value.type == "meta" else value
    if isinstance(value, list | tuple):
        return type(value)(_given(one, of, here) for one in value)
    return {key: _given(one, of, here) for key, one in value.items()} if isinstance(value, dict) else value


def _wide_results(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return _results(operation, _widened(list(args)), _widened(dict(kwargs)))


def _results(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return what an operation makes; of attention by a kernel that is not here, its first result by torch's own."""
    try:
        return each(operation(*args, **kwargs))
    except (RuntimeError, NotImplementedError):  # no such kernel on this device; of others it is raised again
        name = operation.overloadpacket.__name__
        if not name.startswith(_ATTENTION) or name.endswith("backward"):
            raise
    given = {**dict(zip([one.name for one in operation._schema.arguments], args, strict=False)), **kwargs}
    query, key, value = args[:3]  # which come first in all
    found = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        given.get("attn_mask", given.get("attn_bias")),
        0.0,
        bool(given.get("is_causal")),
        scale=given.get("scale"),
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return [found]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("cpu", _WIDE if value.dtype in _NARROW else None)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list):
        return [_widened(one) for one in value]
    if isinstance(value, dict):
        return {key: _widened(one) for key, one in value.items()}
    return _WIDE if value in _NARROW else value


def largest_share(
    actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor, limits: Mapping[str, float] | None = None
) -> tuple[float, int, str]:
    """Return the largest error over what is allowed, the number of the worst element, and whose error it is.

    `allowed` is of each element by itself. `limits` are those of it, of a row (its root mean square) and of the scale
    (the component along the exact values), in units of what rounding makes in each element.
    """
    exact = expected.to(_WIDE)
    error = (actual.detach().to("cpu", _WIDE).reshape(-1) - exact.reshape(-1)).reshape(exact.shape)
    share = torch.where(error == 0, 0.0, error / allowed.to(_WIDE).reshape(exact.shape))
    share = torch.where(share.isnan(), torch.inf, share)
    worst = int(share.abs().reshape(-1).argmax())
    found = {"element": float(share.abs().max())}
    if limits is not None and exact.dim() > 0 and bool(share.isfinite().all()):
        rows = share.reshape(-1, exact.shape[-1])
        rows = rows.T if limits.get("by_columns") else rows
        found["row"] = float(rows.square().mean(1).sqrt().max()) * limits["element"] / limits["row"]
        values = exact.nan_to_num(0.0, 0.0, 0.0) / allowed.to(_WIDE).reshape(exact.shape)
        along = float((share * values).sum().abs() / values.square().sum().clamp_min(1e-300))
        found["scale"] = along / limits["scale"]
    whose = max(found, key=lambda name: found[name])
    return found[whose], worst, whose


def blamed(
    calls: Sequence[AtenCall], inputs: Tensors, device: Any, share: Callable[[Mapping[str, torch.Tensor]], float]
) -> list[int]:
    """Return the calls of the one operation without whose errors the result is within `share` 1; none where none is.

    The operations with the largest errors of their own are tried in turn: each is computed in float64 from the same
    operands and rounded, and all others as they are. Of its calls those are returned that explain the result alone, or
    else together.
    """
    errors: dict[int, float] = {}
    with contextlib.suppress(RuntimeError, NotImplementedError):  # one without float64: what comes before it is known
        run_calls(calls, inputs, device, errors=errors)

    def is_right_without(numbers: Collection[int]) -> bool:
        return share(run_calls(calls, inputs, device, numbers)) <= 1

    worst = sorted(errors, key=lambda number: -errors[number])
    for operation in list(dict.fromkeys(str(calls[number].operation) for number in worst))[:_TRIED]:
        numbers = [number for number in worst if str(calls[number].operation) == operation]
        if is_right_without(numbers):
            alone = [number for number in numbers[:_TRIED] if is_right_without({number})]
            if alone or len(numbers) > 2 * _TRIED:
                return alone or numbers
            needed = set(numbers)
            for number in reversed(numbers):  # the least wrong first
                if is_right_without(needed - {number}):
                    needed.remove(number)
            return sorted(needed)
    return []
