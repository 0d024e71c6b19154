"""Note which operations of ATen a module calls on given inputs, and keep what they take, for a reproducer.

Below autograd every operation passes a dispatch mode, whatever Python code has called it: transformers', PEFT's or a
hook's. What is noted is the flat list of calls that a result depends on (`numerics/aten_calls.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from consistency.capture.names import CALLS, CUT
from consistency.devices.products import Products
from consistency.numerics.aten_calls import (
    MOST_CALLS,
    PRODUCTS,
    AtenCall,
    CallsError,
    Name,
    allowed_operation,
    blamed,
    each,
    largest_share,
    read_calls,
    run_calls,
    run_exactly,
)
from consistency.numerics.bound import gamma
from consistency.numerics.digest import as_bytes
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.identity import storage_of
from consistency.numerics.precision import partial_sums_error
from consistency.numerics.widening import each_tensor
from consistency.worker.model.structure import blocks_of, parts_of

MOST_BYTES = 8 * 2**20
"""Of what the calls take: with 1 MiB of results a reproducer stays under 10 MB, which issue trackers accept."""

_MOST_READ = 2**30
"""Of the same, while the operation that is off is looked for."""


class NotTracedError(Exception):
    """Why there are no calls that could be run elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Calls, what they take, on the CPU, and the result that they had on the device."""

    text: str
    inputs: Mapping[str, torch.Tensor]
    result: torch.Tensor


_Key = tuple[Any, ...]


class CallTrace(TorchDispatchMode):
    """Note calls while the mode is active."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._device = device
        self._known: dict[_Key, str] = {}
        self._kept: list[torch.Tensor] = []
        self._calls: list[AtenCall] = []
        self._held: dict[_Key, tuple[Name, torch.Tensor]] = {}
        """All tensors, by their memory, which none may leave to another: autograd makes objects of its own of views."""
        self._storages: dict[str, int] = {}
        self._inputs: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        """Inputs that are written into, as they were."""
        self.refused = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        noted = None if self.refused else self._given(func, args, kwargs)
        found = func(*args, **kwargs)
        results = [one for one in _pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
        if noted is not None and results and not self.refused:
            names = tuple(self._name(one, f"v{len(self._held)}") for one in results)
            self._calls.append(AtenCall(operation=func, args=noted[0], kwargs=noted[1], results=names))
        return found

    def _given(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return what a call takes, by names; what it writes into is kept as it was."""
        named = each_tensor(self._input, (args, kwargs))
        if func._schema.is_mutable:
            if not allowed_operation(func):
                self.refused = f"{func} is no operation that a reproducer may call"
            places = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            written = [places.get(one.name) for one in func._schema.arguments if one.is_write]
            storages = {storage_of(one) for one in written if isinstance(one, torch.Tensor)}
            for name, tensor in self._inputs.items():
                if name not in self._before and storage_of(tensor) in storages:
                    self._before[name] = _elements(tensor)
        return tuple(_pytree.tree_map_only(torch.device, self._place, named))

    def _place(self, device: torch.device) -> torch.device:
        return torch.device("meta" if device.type == self._device.type else "cpu")

    def _input(self, tensor: torch.Tensor) -> Name:
        if _key(tensor) not in self._held:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                self.refused = f"it computes with a {type(tensor).__name__}"
                return Name("other")
            words = re.sub(r"\W+", "_", self._known.get(_key(tensor), ""))
            start = "in" if tensor.device.type == self._device.type else "host"
            name = self._name(tensor, f"{start}{len(self._inputs) + 1}{words and '_'}{words}")
            self._inputs[name] = tensor
        return self._held[_key(tensor)][0]

    def _name(self, tensor: torch.Tensor, name: str) -> Name:
        if _key(tensor) not in self._held:
            self._held[_key(tensor)] = Name(name), tensor
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
                self._storages[name] = storage_of(tensor)
        return self._held[_key(tensor)][0]

    def know(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor, which has a name where it is an input."""
        self._known[_key(tensor)] = name
        self._kept.append(tensor)
        return tensor

    def finish(self, result: torch.Tensor | None) -> Traced:
        """Return the calls that a result depends on.

        Raises
        ------
        NotTracedError
        """
        with _disable_current_modes():
            if result is None or _key(result) not in self._held:
                raise NotTracedError("its module returns what no noted operation has made")
            last, calls = self._held[_key(result)][0], list[AtenCall]()
            needed, storages = {str(last)}, {self._storages.get(last)}
            for call in reversed(self._calls):
                names = [one for one in _pytree.tree_leaves((call.args, call.kwargs)) if isinstance(one, Name)]
                writes = call.operation._schema.is_mutable and any(self._storages.get(n) in storages for n in names)
                if writes or not needed.isdisjoint(call.results):
                    calls.insert(0, call)
                    needed.update(names)
                    storages.update(map(self._storages.get, names))
            inputs = {name: tensor for name, tensor in self._inputs.items() if name in needed}
            self._refuse(calls, inputs)
            lines = list[str]()
            for name, tensor in inputs.items():
                lines.append(f"# {name}: {self._known.get(_key(tensor), 'given to the module')}, {list(tensor.shape)}")
                if not tensor.is_contiguous():
                    shape, strides = list(tensor.shape), list(tensor.stride())
                    lines.append(f"{name} = aten.as_strided.default({name}, {shape}, {strides}, 0)")
            try:
                text = "\n".join([*lines, *map(str, calls), f"return {last}", ""])
                read_calls(text, inputs)
            except CallsError as error:
                raise NotTracedError(str(error)) from None
            kept = {name: self._before.get(name, _elements(tensor)) for name, tensor in inputs.items()}
            return Traced(text=text, inputs=kept, result=_copy(result))

    def _refuse(self, calls: Sequence[AtenCall], inputs: Mapping[str, torch.Tensor]) -> None:
        """Raise where other calls, or other values, would be run."""
        shared = Counter(storage_of(tensor) for tensor in inputs.values())
        if any(name in self._before and shared[storage_of(tensor)] > 1 for name, tensor in inputs.items()):
            self.refused = "it writes into what it reads by several views"
        for call in calls:
            if not allowed_operation(call.operation):
                self.refused = f"{call.operation} is no operation that a reproducer may call"
        size = sum(tensor.nbytes for tensor in inputs.values())
        if size > _MOST_READ:
            self.refused = f"its calls take {size >> 20} MiB"
        if self.refused or len(calls) + len(inputs) > MOST_CALLS:
            raise NotTracedError(self.refused or f"it calls {len(calls)} operations")


def _key(tensor: torch.Tensor) -> _Key:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU of the memory that a tensor spans, as it is if that is its elements in order."""
    with _disable_current_modes():
        tensor = tensor.detach()
        if tensor.is_contiguous():
            return _copy(tensor)
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return _copy(tensor.as_strided((span,), (1,)))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


Saw = Callable[[str, torch.Tensor], torch.Tensor]
"""Called by a pass with the name of a result and its value, which it returns."""


def trace_module(
    model: torch.nn.Module, layer: str, name: str, device: torch.device, run: Callable[[Saw], None]
) -> Traced:
    """Run a pass, and return the calls that a result of this name depends on, in the module of a block that makes it.

    A module in a block has no name of its own in a pass: its result is what it returns first.

    Raises
    ------
    NotTracedError
    """
    blocks = blocks_of(model)
    parts = {f"{path}.{part}": child for path, block in blocks.items() for part, child in parts_of(block).items()}
    is_part = name.partition("@")[0] == f"{layer}::" and layer in parts
    holder = layer if is_part else next((path for path in blocks if f"{layer}.".startswith(f"{path}.")), None)
    if holder is None:
        raise NotTracedError("it is made outside of the blocks")
    module, number = (blocks | parts)[holder], int(name.partition("@")[2] or 1)
    trace, done = CallTrace(device), list[Traced | NotTracedError]()
    results, count = list[torch.Tensor](), 0

    def saw(of: str, value: torch.Tensor) -> torch.Tensor:
        if of == name:
            results.append(value)
        return value

    def finish() -> None:
        try:
            done.append(trace.finish(results[0] if results else None))
        except NotTracedError as error:
            done.append(error)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count != number:
            return module._call_impl(*args, **kwargs)
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            trace.know(tensor, path)
        with trace:
            found = module._call_impl(*args, **kwargs)
        if is_part:
            results[:] = [one for one in _pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
        if results:  # before a merged weight is another again
            finish()
        return found

    with mock.patch.object(module, "_compiled_call_impl", call):  # which `__call__` takes, with all hooks inside
        run(saw)
    if not done:  # gradients of parameters are known at the end
        finish()
    if isinstance(done[0], NotTracedError):
        raise done[0]
    return done[0]


def kept_parts(
    traced: Traced, device: torch.device, products: Products, share: Callable[[torch.Tensor], float]
) -> tuple[dict[str, torch.Tensor], float]:
    """Return what a reproducer needs, and how far the result was off when it was computed again, over its allowance.

    Calls that take too much are cut to the product of matrices that is off by itself, with results of its own.

    Raises
    ------
    NotTracedError
    """
    calls, last = read_calls(traced.text, traced.inputs)
    if not torch.equal(as_bytes(_copy(run_calls(calls, traced.inputs, device)[last])), as_bytes(traced.result)):
        raise NotTracedError("the same calls give other bits when they are repeated")
    again = share(traced.result)
    if _bytes(traced) <= MOST_BYTES:
        return _as_tensors(traced), again
    size = f"its calls take {_bytes(traced) >> 20} MiB"
    if again <= 1:
        raise NotTracedError(f"{size}, and their result was right when it was computed again")
    inputs = {name: one if name.startswith("host") else one.to(device) for name, one in traced.inputs.items()}
    for number in blamed(calls, inputs, device, lambda found: share(found[last]))[:4]:
        if calls[number].operation.overloadpacket.__name__ not in PRODUCTS:
            continue
        values = run_calls(calls[:number], inputs, device)
        one, own, expected = _alone(calls[number], values, device)
        if _bytes(one) > MOST_BYTES:
            error = (one.result.to(torch.float64) - expected).abs().reshape(-1, expected.shape[-1])
            one, own, expected = _alone(calls[number], values, device, int(error.amax(0).argmax()))
        if _bytes(one) > MOST_BYTES:
            continue
        limit = _allowed_product(own, one, expected, products)
        if largest_share(one.result, expected, limit)[0] > 1:
            cut = {f"{CUT}actual": one.result, f"{CUT}expected": expected, f"{CUT}allowed": limit}
            return {**_as_tensors(one), **cut}, again
    raise NotTracedError(f"{size}, and no part that is smaller shows it by itself")


def _allowed_product(
    calls: Sequence[AtenCall], one: Traced, expected: torch.Tensor, products: Products
) -> torch.Tensor:
    """Return what a product of matrices may be off by: K roundings of the sum of its absolute products, and the store.

    Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5, with what the settings in force permit.
    The worker's own passes with noise would not do: on a CPU under test they have its fault.
    """
    values = run_exactly(calls, {name: tensor.abs() for name, tensor in one.inputs.items()})
    last, dtype = calls[-1], one.result.dtype
    terms = values[last.args[PRODUCTS[last.operation.overloadpacket.__name__] + 1]].shape[-2]
    error = gamma(terms + 2, UNIT_ROUNDOFF[torch.float32]) + products.matmul.product_error
    if (each := products.partial_terms.get(name_of(dtype))) is not None:
        error += partial_sums_error(terms, UNIT_ROUNDOFF[dtype], each=each)
    summed = error * values[last.results[0]]
    return summed + UNIT_ROUNDOFF[dtype] * (expected.abs() + summed)


def _alone(
    call: AtenCall, values: Mapping[str, torch.Tensor], device: torch.device, column: int | None = None
) -> tuple[Traced, list[AtenCall], torch.Tensor]:
    """Return a call by itself, as noted and as read, and its exact result; of a product only columns around one."""

    def operand(value: Any) -> Any:
        if isinstance(value, Name):
            return values[value]
        return device if isinstance(value, torch.device) and value.type == "meta" else value

    args, kwargs = _pytree.tree_map(operand, (list(call.args), dict(call.kwargs)))
    if column is not None:
        first = PRODUCTS[call.operation.overloadpacket.__name__]
        rows, matrix = args[first : first + 2]
        room = (MOST_BYTES - rows.nbytes) // ((matrix.numel() // matrix.shape[-1] + 1) * matrix.element_size()) // 2
        start = max(0, min(column - room // 2, matrix.shape[-1] - room))
        args[first + 1] = matrix[..., start : start + room]
        if first and args[0].dim() and args[0].shape[-1] > 1:
            args[0] = args[0][..., start : start + room]
    trace = CallTrace(device)
    with torch.no_grad(), trace:
        found = each(call.operation(*args, **kwargs))
    one = trace.finish(found[0])
    calls, result = read_calls(one.text, one.inputs)
    return one, calls, run_exactly(calls, one.inputs)[result]


def _as_tensors(traced: Traced) -> dict[str, torch.Tensor]:
    text = torch.frombuffer(bytearray(traced.text.encode()), dtype=torch.uint8)
    return {CALLS: text, **traced.inputs}


def _bytes(traced: Traced) -> int:
    return sum(one.nbytes for one in traced.inputs.values())
