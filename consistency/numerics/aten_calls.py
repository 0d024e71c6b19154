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
"""Most calls of a text, and most characters of a line: a block of experts in a loop has some hundred calls."""

_PRIVATE = frozenset({
    "_to_copy", "_unsafe_view", "_reshape_alias", "_softmax", "_log_softmax", "_fused_rms_norm", "_safe_softmax",
    "_native_batch_norm_legit_no_training", "_adaptive_avg_pool2d", "_native_multi_head_attention", "_grouped_mm",
    "_softmax_backward_data", "_log_softmax_backward_data", "_fused_rms_norm_backward",
})  # fmt: skip
"""Private operations that a text may call."""
_ATTENTION = "_scaled_dot_product_"
"""Beginning of the names of private operations that compute attention by some kernel."""
_REFUSED = re.compile(r"set_|.*resize.*|from_file|record_stream|.*storage.*")
"""Names of public operations that change what memory a tensor has, or read a file."""
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Products of two matrices, and where the first is among their arguments."""
_MOST_TRIED = 6
"""Most operations, and calls of one operation, that are tried as a cause: each try takes a run of all calls."""

_WORDS = ("none", "tanh", "floor", "trunc")
"""Strings that may be arguments: how GELU is approximated, how a quotient is rounded."""

_WIDE = torch.float64
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class CallsError(ValueError):
    """The text does not have the form that is described above."""


class Name(str):
    """A tensor among the arguments of a call."""

    __slots__ = ()


@dataclass(frozen=True)
class AtenCall:
    """A call of an operation, with names in place of tensors."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    """`args`, `kwargs`: arguments, with a `Name` for each tensor; `here` is the device `meta`, `host` is `cpu`."""
    results: tuple[str, ...]
    """A name for each tensor that the call returns."""

    def __str__(self) -> str:
        arguments = [*map(_write_value, self.args)]
        arguments += [f"{name}={_write_value(value)}" for name, value in self.kwargs.items()]
        return f"{', '.join(self.results)} = {self.operation}({', '.join(arguments)})"


Tensors = Mapping[str, torch.Tensor]
"""Tensors by their names in a text."""


def allowed_operation(operation: Any) -> bool:
    """Report whether a text may call an operation: see the first lines of this file."""
    if not isinstance(operation, torch._ops.OpOverload) or operation.namespace != "aten":
        return False
    name, schema = operation.overloadpacket.__name__, operation._schema
    is_private = name.startswith("_") and not name.startswith(("__", _ATTENTION))
    if is_private and name not in _PRIVATE:
        return False
    # a string that has to be given may be the name of a file
    needs_string = any(str(arg.type) == "str" and not arg.has_default_value() for arg in schema.arguments)
    returns_tensors = all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns)
    return bool(schema.returns) and returns_tensors and not needs_string and not _REFUSED.fullmatch(name)


def read_calls(text: str, inputs: Collection[str]) -> tuple[list[AtenCall], str]:
    """Return the calls of a text, and the name of its result.

    Parameters
    ----------
    text : str
        One call a line, and last a line that returns the result; empty lines and lines that begin with `#` are skipped.
    inputs : collection of str
        Names of the tensors that are known before the first call.

    Raises
    ------
    CallsError
        A line is neither a call that is allowed, of names that are known, nor the result.
    """
    names, calls = set(inputs), list[AtenCall]()
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        try:
            node = ast.parse(line).body[0] if len(line) <= MOST_CHARACTERS else None
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id in names:
                return calls, node.value.id
            if not isinstance(node, ast.Assign) or len(node.targets) != 1 or len(calls) == MOST_CALLS:
                raise CallsError(f"not a call of ATen: {line[:80]!r}")
            calls.append(_read_call(node, names))
        except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError) as error:
            raise CallsError(f"not a call of ATen: {line[:80]!r}") from error
        names.update(calls[-1].results)
    raise CallsError("no result is named")


def _read_call(node: ast.Assign, names: Collection[str]) -> AtenCall:
    """Return the call of a parsed line; `names` has the tensors that are known before it."""
    target, call = node.targets[0], node.value
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    if not isinstance(call, ast.Call) or not all(isinstance(result, ast.Name) for result in targets):
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
        args=tuple(_read_value(arg, names) for arg in call.args),
        kwargs={str(keyword.arg): _read_value(keyword.value, names) for keyword in call.keywords},
        results=tuple(result.id for result in targets if isinstance(result, ast.Name)),
    )


def _read_value(node: ast.expr, names: Collection[str]) -> Any:
    """Return an argument of a call; `names` has the tensors that are known before it."""
    match node:
        case ast.Constant(value=None | bool() | float() as value):
            return value
        case ast.Constant(value=int() as value) if value < 1 << 63:
            return value
        case ast.Constant(value=str() as value) if value in _WORDS:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name() as operand):
            value = _read_value(operand, names)
            if type(value) in (int, float):
                return -value
        case ast.List(elts=elements):
            return [_read_value(element, names) for element in elements]
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Name(id="here" | "host" as name):
            kind = "meta" if name == "here" else "cpu"
            return torch.device(kind)
        case ast.Name(id=name) if name in names:
            return Name(name)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
                return value
    raise CallsError("not an argument")


def _write_value(value: Any) -> str:
    """Return the text of an argument, from which `_read_value` reads it again."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write_value, value))}]"
    if isinstance(value, torch.device):  # where a trace has put the device that it was made on
        return "here" if value.type == "meta" else "host"
    types = Name | bool | int | float | torch.dtype | torch.layout | torch.memory_format
    if value is not None and not isinstance(value, types) and value not in _WORDS:
        raise CallsError(f"not an argument: {value!r}")
    return str(value) if isinstance(value, Name | float) else repr(value)


def run_calls(
    calls: Sequence[AtenCall],
    inputs: Tensors,
    device: Any,
    exactly: Collection[int] = (),
    errors: dict[int, float] | None = None,
) -> dict[str, torch.Tensor]:
    """Run calls on a device, and return all tensors by name.

    Inputs whose names begin with `host` stay on the CPU.

    Parameters
    ----------
    exactly : collection of int
        Numbers of the calls that are computed in float64 instead, with results rounded.
    errors : dict of int to float, optional
        Filled with the distance of each call's result, by itself, from float64: relative to its values and in roundings
        of its dtype.
    """
    values = {name: tensor.to(_input_device(name, device), copy=True) for name, tensor in inputs.items()}
    for number, call in enumerate(calls):
        args, kwargs = _with_values((call.args, call.kwargs), lambda name: values[name], torch.device(device))
        needs_exact = not call.operation.is_view and (errors is not None or number in exactly)
        # computed first, for the operation may write into its operands
        exact_results = _wide_results(call.operation, args, kwargs) if needs_exact else []
        results = _results(call.operation, args, kwargs)
        if errors is not None:
            _note_error(errors, number, results, exact_results)
        else:
            for result, exact in zip(results, exact_results, strict=False):
                if result.is_floating_point():
                    result.copy_(exact)
        values.update(zip(call.results, results, strict=False))
    return values


def _note_error(
    errors: dict[int, float], number: int, results: Sequence[torch.Tensor], exact_results: Sequence[torch.Tensor]
) -> None:
    """Note the error of a call's first floating-point result, if it has one: see `run_calls`."""
    for result, exact in zip(results, exact_results, strict=False):
        if result.is_floating_point():
            wide = result.to("cpu", _WIDE)
            error = torch.where(wide == exact, 0.0, wide - exact).norm().nan_to_num(torch.inf, torch.inf)
            size = exact.nan_to_num(0.0, 0.0, 0.0).norm() * torch.finfo(result.dtype).eps
            errors[number] = float(error / size.clamp_min(1e-300))
            return


def _input_device(name: str, device: Any) -> Any:
    return "cpu" if name.startswith("host") else device


def run_exactly(calls: Sequence[AtenCall], inputs: Tensors) -> dict[str, torch.Tensor]:
    """Run calls in float64 on the CPU, without rounding in between; return all tensors."""
    values = {name: _widened(tensor).clone() for name, tensor in inputs.items()}
    for call in calls:
        args, kwargs = _with_values((call.args, call.kwargs), lambda name: values[name], torch.device("cpu"))
        values.update(zip(call.results, _wide_results(call.operation, args, kwargs), strict=False))
    return values


def each(found: Any) -> list[torch.Tensor]:
    """Return the tensors among the results of an operation."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [result for result in found if isinstance(result, torch.Tensor)]


def _with_values(value: Any, tensor_of: Callable[[Name], Any], here: torch.device) -> Any:
    """Return arguments with tensors in place of their names, and a device in place of `here`."""
    if isinstance(value, Name):
        return tensor_of(value)
    if isinstance(value, torch.device):
        return here if value.type == "meta" else value
    if isinstance(value, list | tuple):
        return type(value)(_with_values(element, tensor_of, here) for element in value)
    if isinstance(value, dict):
        return {key: _with_values(element, tensor_of, here) for key, element in value.items()}
    return value


def _wide_results(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the results of an operation in float64 on the CPU."""
    return _results(operation, _widened(list(args)), _widened(dict(kwargs)))


def _results(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the results of an operation; where its kernel for attention is missing, the first, by torch's function."""
    try:
        return each(operation(*args, **kwargs))
    except (RuntimeError, NotImplementedError):  # no such kernel on this device; of others it is raised again
        name = operation.overloadpacket.__name__
        if not name.startswith(_ATTENTION) or name.endswith("backward"):
            raise
    names = [argument.name for argument in operation._schema.arguments]
    named_args = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = args[:3]  # which come first in all
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        named_args.get("attn_mask", named_args.get("attn_bias")),
        0.0,
        bool(named_args.get("is_causal")),
        scale=named_args.get("scale"),
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return [output]


def _widened(value: Any) -> Any:
    """Return arguments on the CPU with float64 in place of narrower floats, in tensors and dtypes."""
    if isinstance(value, torch.Tensor):
        dtype = _WIDE if value.dtype in _NARROW else None
        return value.to("cpu", dtype)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list):
        return [_widened(element) for element in value]
    if isinstance(value, dict):
        return {key: _widened(element) for key, element in value.items()}
    return _WIDE if value in _NARROW else value


def largest_ratio(
    actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor, limits: Mapping[str, float] | None = None
) -> tuple[float, int, str]:
    """Return the largest ratio of error to tolerance, the number of the worst element, and whose error it is.

    Whose is `element`, `row` or `scale`.

    Parameters
    ----------
    allowed : torch.Tensor
        The tolerance of each element by itself, in the shape of `expected` or flat.
    limits : mapping of str to float, optional
        The limits of an element, of a row (its root mean square) and of the scale (the component along the exact
        values), in units of what rounding makes in each element: `ErrorLimits.of_figures`. Without them elements alone
        are judged.
    """
    exact = expected.to(_WIDE)
    error = (actual.detach().to("cpu", _WIDE).reshape(-1) - exact.reshape(-1)).reshape(exact.shape)
    ratios = torch.where(error == 0, 0.0, error / allowed.to(_WIDE).reshape(exact.shape))
    ratios = torch.where(ratios.isnan(), torch.inf, ratios)
    worst = int(ratios.abs().reshape(-1).argmax())
    figures = {"element": float(ratios.abs().max())}
    if limits is not None and exact.dim() > 0 and bool(ratios.isfinite().all()):
        rows = ratios.reshape(-1, exact.shape[-1])
        rows = rows.T if limits.get("by_columns") else rows
        # ratios are in units of the limit of an element
        figures["row"] = float(rows.square().mean(1).sqrt().max()) * limits["element"] / limits["row"]
        values = exact.nan_to_num(0.0, 0.0, 0.0) / allowed.to(_WIDE).reshape(exact.shape)
        along = float((ratios * values).sum().abs() / values.square().sum().clamp_min(1e-300))
        figures["scale"] = along / limits["scale"]
    whose = max(figures, key=lambda name: figures[name])
    return figures[whose], worst, whose


def blamed(
    calls: Sequence[AtenCall], inputs: Tensors, device: Any, ratio: Callable[[Mapping[str, torch.Tensor]], float]
) -> list[int]:
    """Return the calls of the one operation without whose errors the result is within tolerance; empty where none is.

    The operations with the largest errors of their own are tried in turn: each is computed in float64 from the same
    operands and rounded, and all others as they are. Of its calls those are returned that explain the result alone, or
    else together.

    Parameters
    ----------
    ratio : callable
        Returns from all tensors by name the ratio of the result's error to its tolerance.
    """
    errors: dict[int, float] = {}
    with contextlib.suppress(RuntimeError, NotImplementedError):  # one without float64: what comes before it is known
        run_calls(calls, inputs, device, errors=errors)

    def is_right_without(numbers: Collection[int]) -> bool:
        return ratio(run_calls(calls, inputs, device, numbers)) <= 1

    worst_first = sorted(errors, key=lambda number: -errors[number])
    operations = list(dict.fromkeys(str(calls[number].operation) for number in worst_first))
    for operation in operations[:_MOST_TRIED]:
        numbers = [number for number in worst_first if str(calls[number].operation) == operation]
        if is_right_without(numbers):
            return _needed_calls(numbers, is_right_without)
    return []


def _needed_calls(numbers: Sequence[int], is_right_without: Callable[[Collection[int]], bool]) -> list[int]:
    """Return the calls that explain the result alone, or else those that do together, without any that is not needed.

    `numbers` are all calls of an operation, the worst one first. Where many explain the result only together, all are
    returned: to leave one out takes a run of all calls.
    """
    alone = [number for number in numbers[:_MOST_TRIED] if is_right_without({number})]
    if alone:
        return alone
    if len(numbers) > 2 * _MOST_TRIED:
        return list(numbers)
    needed = set(numbers)
    for number in reversed(numbers):  # the least wrong first
        if is_right_without(needed - {number}):
            needed.remove(number)
    return sorted(needed)
