"""Note which operations of ATen a module calls on given inputs, and keep the tensors that they take, for a reproducer.

Below autograd every operation passes a dispatch mode, whatever Python code has called it: transformers', PEFT's or a
hook's. The result is the flat list of calls that a result depends on (`numerics/aten_calls.py`).
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
from torch.utils._python_dispatch import _disable_current_modes

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
    largest_ratio,
    read_calls,
    run_calls,
    run_exactly,
)
from consistency.numerics.bound import gamma
from consistency.numerics.digest import as_bytes
from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.identity import storage_of
from consistency.numerics.precision import partial_sums_error
from consistency.numerics.widening import each_tensor
from consistency.worker.model.structure import blocks_of, parts_of

MOST_BYTES = 8 * 2**20
"""Most bytes of inputs in a reproducer: with 1 MiB of results it stays under 10 MB, which issue trackers accept."""

_MOST_READ = 2**30
"""Most bytes of inputs with which the operation that is wrong is looked for."""

_MOST_BLAMED = 4
"""Most operations that are tried by themselves, the most suspect one first."""


class NotTracedError(Exception):
    """There are no calls that could be run elsewhere; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Calls, and the result that they had on the device.

    Attributes
    ----------
    text : str
        The calls, a line each, as `read_calls` reads them.
    inputs : mapping of str to torch.Tensor
        The tensors that they take, by the names in the text, on the CPU.
    result : torch.Tensor
        On the CPU.
    """

    text: str
    inputs: Mapping[str, torch.Tensor]
    result: torch.Tensor


_Key = tuple[Any, ...]
"""Identity of a tensor by its memory: two objects for one view have the same key."""


class CallTrace(DispatchMode):
    """Note calls while the mode is active."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._device = device
        self._parameter_names: dict[_Key, str] = {}
        self._parameters: list[torch.Tensor] = []
        """Tensors with a name of their own, held so that no other tensor gets their memory."""
        self._calls: list[AtenCall] = []
        self._named: dict[_Key, tuple[Name, torch.Tensor]] = {}
        """All tensors, by their memory, which none may leave to another: autograd makes objects of its own of views."""
        self._storages: dict[str, int] = {}
        """Address of the storage of each tensor, by name."""
        self._inputs: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        """Inputs that are written into, as they were."""
        self.refused = ""
        """Why the calls cannot be run elsewhere; empty while they can."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        arguments = None if self.refused else self._named_arguments(func, args, kwargs)
        output = func(*args, **kwargs)
        results = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if arguments is not None and results and not self.refused:
            names = tuple(self._name(result, f"v{len(self._named)}") for result in results)
            self._calls.append(AtenCall(operation=func, args=arguments[0], kwargs=arguments[1], results=names))
        return output

    def _named_arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call with names in place of tensors, and devices that stand for any device.

        Inputs that the call writes into are copied before.
        """
        named = each_tensor(self._input, (args, kwargs))
        if func._schema.is_mutable:
            if not allowed_operation(func):
                self.refused = f"{func} is no operation that a reproducer may call"
            self._copy_written_inputs(func._schema.arguments, args, kwargs)
        return tuple(_pytree.tree_map_only(torch.device, self._stand_in, named))

    def _copy_written_inputs(self, parameters: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy the inputs that a call writes into, by the parameters of its schema."""
        values = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | dict(kwargs)
        written = [values.get(parameter.name) for parameter in parameters if parameter.is_write]
        storages = {storage_of(value) for value in written if isinstance(value, torch.Tensor)}
        for name, tensor in self._inputs.items():
            if name not in self._before and storage_of(tensor) in storages:
                self._before[name] = _elements(tensor)

    def _stand_in(self, device: torch.device) -> torch.device:
        """Return the device that stands for the traced one, `meta`, or for any other, `cpu`."""
        return torch.device("meta" if device.type == self._device.type else "cpu")

    def _input(self, tensor: torch.Tensor) -> Name:
        """Return the name of a tensor that a call takes; one that no noted call has made is an input."""
        if _key(tensor) not in self._named:
            if not _is_plain(tensor):
                self.refused = f"it computes with a {type(tensor).__name__}"
                return Name("other")
            words = re.sub(r"\W+", "_", self._parameter_names.get(_key(tensor), ""))
            start = "in" if tensor.device.type == self._device.type else "host"
            name = self._name(tensor, f"{start}{len(self._inputs) + 1}{words and '_'}{words}")
            self._inputs[name] = tensor
        return self._named[_key(tensor)][0]

    def _name(self, tensor: torch.Tensor, name: str) -> Name:
        """Return the name of a tensor: this one, unless it has one already."""
        if _key(tensor) not in self._named:
            self._named[_key(tensor)] = Name(name), tensor
            if _is_plain(tensor):
                self._storages[name] = storage_of(tensor)
        return self._named[_key(tensor)][0]

    def know(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Let the name of a parameter be a part of its name as an input; return the parameter."""
        self._parameter_names[_key(tensor)] = name
        self._parameters.append(tensor)
        return tensor

    def finish(self, result: torch.Tensor | None) -> Traced:
        """Return the calls that a result depends on.

        Raises
        ------
        NotTracedError
        """
        with _disable_current_modes():
            if result is None or _key(result) not in self._named:
                raise NotTracedError("its module returns what no noted operation has made")
            last = self._named[_key(result)][0]
            calls, needed = self._calls_for(last)
            inputs = {name: tensor for name, tensor in self._inputs.items() if name in needed}
            self._refuse(calls, inputs)
            lines = list[str]()
            for name, tensor in inputs.items():
                origin = self._parameter_names.get(_key(tensor), "given to the module")
                lines.append(f"# {name}: {origin}, {list(tensor.shape)}")
                if not tensor.is_contiguous():  # its memory is stored in one dimension: see `_elements`
                    shape, strides = list(tensor.shape), list(tensor.stride())
                    lines.append(f"{name} = aten.as_strided.default({name}, {shape}, {strides}, 0)")
            try:
                text = "\n".join([*lines, *map(str, calls), f"return {last}", ""])
                read_calls(text, inputs)  # a text that cannot be read here cannot be read by a reproducer either
            except CallsError as error:
                raise NotTracedError(str(error)) from None
            host_inputs = {name: self._before.get(name, _elements(tensor)) for name, tensor in inputs.items()}
            return Traced(text=text, inputs=host_inputs, result=_copy(result))

    def _calls_for(self, last: Name) -> tuple[list[AtenCall], set[str]]:
        """Return the calls that a tensor depends on, in order, and the names of all tensors that these take.

        A call is one of them where it makes a tensor that is needed, or writes into memory of one.
        """
        calls: list[AtenCall] = []
        needed, storages = {str(last)}, {self._storages.get(last)}
        for call in reversed(self._calls):
            names = [leaf for leaf in _pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Name)]
            is_mutable = call.operation._schema.is_mutable
            writes = is_mutable and any(self._storages.get(name) in storages for name in names)
            if writes or not needed.isdisjoint(call.results):
                calls.insert(0, call)
                needed.update(names)
                storages.update(map(self._storages.get, names))
        return calls, needed

    def _refuse(self, calls: Sequence[AtenCall], inputs: Mapping[str, torch.Tensor]) -> None:
        """Raise `NotTracedError` where a reproducer would run other calls, or run them on other values."""
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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Report whether a tensor is a dense one of torch's own classes, whose bytes say all of it."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _key(tensor: torch.Tensor) -> _Key:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU of the memory that a tensor spans: of a contiguous one in its shape, else flat."""
    with _disable_current_modes():
        tensor = tensor.detach()
        if tensor.is_contiguous():
            return _copy(tensor)
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return _copy(tensor.as_strided((span,), (1,)))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


Saw = Callable[[str, torch.Tensor], torch.Tensor]
"""Called by a pass with the name of a result and its value; returns the value."""


def trace_module(
    model: torch.nn.Module, layer: str, name: str, device: torch.device, run: Callable[[Saw], None]
) -> Traced:
    """Run a pass, and return the calls that a result of this name depends on, in the module of a block that makes it.

    Parameters
    ----------
    layer, name : str
        The module with the result, and the result's name in the pass, with the number of the call as in `h.0::@2`. The
        result of a module inside a block is the first tensor that it returns.
    run : callable
        Runs the pass; it calls the function that it is given with every result.

    Raises
    ------
    NotTracedError
    """
    module, is_part = _module_to_trace(model, layer, name)
    number = int(name.partition("@")[2] or 1)
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
            output = module._call_impl(*args, **kwargs)
        if is_part:
            results[:] = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if results:  # now, while a weight that is merged for this call has its merged values
            finish()
        return output

    with mock.patch.object(module, "_compiled_call_impl", call):  # which `__call__` takes, with all hooks inside
        run(saw)
    if not done:  # gradients of parameters are known at the end
        finish()
    if isinstance(done[0], NotTracedError):
        raise done[0]
    return done[0]


def _module_to_trace(model: torch.nn.Module, layer: str, name: str) -> tuple[torch.nn.Module, bool]:
    """Return the module that makes a result, and whether it is one inside of a block rather than a block.

    Raises
    ------
    NotTracedError
        The result is made outside of the blocks.
    """
    blocks = blocks_of(model)
    parts: dict[str, torch.nn.Module] = {}
    for path, block in blocks.items():
        for part, child in parts_of(block).items():
            parts[f"{path}.{part}"] = child
    if name.partition("@")[0] == f"{layer}::" and layer in parts:
        return parts[layer], True
    for path, block in blocks.items():
        if f"{layer}.".startswith(f"{path}."):
            return block, False
    raise NotTracedError("it is made outside of the blocks")


def kept_parts(
    traced: Traced,
    device: torch.device,
    products: Products,
    ratio_of: Callable[[torch.Tensor], float],
    *,
    most_bytes: int = 0,
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the tensors that a reproducer needs, and the ratio of the result when it was computed again.

    Calls that take more than `MOST_BYTES` are cut to a product of matrices that is wrong by itself, with a result of
    its own.

    Parameters
    ----------
    products : Products
        The products by which the device may compute.
    ratio_of : callable
        Returns the largest ratio of a result.
    most_bytes : int
        Most bytes of what calls take that are kept whole where none of them is wrong by itself.

    Raises
    ------
    NotTracedError
    """
    calls, last = read_calls(traced.text, traced.inputs)
    if not torch.equal(as_bytes(_copy(run_calls(calls, traced.inputs, device)[last])), as_bytes(traced.result)):
        raise NotTracedError("the same calls give other bits when they are repeated")
    ratio = ratio_of(traced.result)
    if _bytes(traced) <= MOST_BYTES:
        return _as_tensors(traced), ratio
    size = f"its calls take {_bytes(traced) >> 20} MiB"
    if ratio <= 1:
        raise NotTracedError(f"{size}, and their result was right when it was computed again")
    inputs = {name: tensor if name.startswith("host") else tensor.to(device) for name, tensor in traced.inputs.items()}
    suspects = blamed(calls, inputs, device, lambda results: ratio_of(results[last]))[:_MOST_BLAMED]
    for number in suspects:
        if calls[number].operation.overloadpacket.__name__ in PRODUCTS:
            values = run_calls(calls[:number], inputs, device)
            cut = _wrong_product(calls[number], values, device, products)
            if cut is not None:
                return cut, ratio
    if _bytes(traced) <= most_bytes:
        return _as_tensors(traced), ratio
    raise NotTracedError(f"{size}, and no part that is smaller shows it by itself")


def _wrong_product(
    call: AtenCall, values: Mapping[str, torch.Tensor], device: torch.device, products: Products
) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a reproducer of one product of matrices; None where it is right, or too large."""
    product, product_calls, expected = _alone(call, values, device)
    if _bytes(product) > MOST_BYTES:
        # the columns around the largest error show it with fewer bytes
        error = (product.result.to(torch.float64) - expected).abs().reshape(-1, expected.shape[-1])
        product, product_calls, expected = _alone(call, values, device, int(error.amax(0).argmax()))
    if _bytes(product) > MOST_BYTES:
        return None
    limit = _allowed_product(product_calls, product, expected, products)
    if largest_ratio(product.result, expected, limit)[0] > 1:
        cut = {f"{CUT}actual": product.result, f"{CUT}expected": expected, f"{CUT}allowed": limit}
        return {**_as_tensors(product), **cut}
    return None


def _allowed_product(
    calls: Sequence[AtenCall], traced: Traced, expected: torch.Tensor, products: Products
) -> torch.Tensor:
    """Return the bound of a product of matrices: K roundings of the sum of its absolute products, and the store.

    Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5, with what the settings in force permit.
    The worker's own passes with noise would not do: on a CPU under test they have its fault.
    """
    values = run_exactly(calls, {name: tensor.abs() for name, tensor in traced.inputs.items()})
    last, dtype = calls[-1], traced.result.dtype
    terms = values[last.args[PRODUCTS[last.operation.overloadpacket.__name__] + 1]].shape[-2]
    error = gamma(terms + 2, UNIT_ROUNDOFF[torch.float32]) + products.matmul.product_error
    if (each := products.partial_terms.get(name_of(dtype))) is not None:
        error += partial_sums_error(terms, UNIT_ROUNDOFF[dtype], each=each)
    summed = error * values[last.results[0]]
    return summed + UNIT_ROUNDOFF[dtype] * (expected.abs() + summed)


def _alone(
    call: AtenCall, values: Mapping[str, torch.Tensor], device: torch.device, column: int | None = None
) -> tuple[Traced, list[AtenCall], torch.Tensor]:
    """Run one call by itself; return it as traced, as calls that can be run, and its exact result.

    Parameters
    ----------
    values : mapping of str to torch.Tensor
        The tensors that the call takes, by name.
    column : int, optional
        A column of the result of a product of matrices: only as many columns around it are computed as a reproducer
        has room for.
    """

    def operand(value: Any) -> Any:
        if isinstance(value, Name):
            return values[value]
        return device if isinstance(value, torch.device) and value.type == "meta" else value

    args, kwargs = _pytree.tree_map(operand, (list(call.args), dict(call.kwargs)))
    if column is not None:
        first = PRODUCTS[call.operation.overloadpacket.__name__]
        rows, matrix = args[first : first + 2]
        bytes_per_column = (matrix.numel() // matrix.shape[-1] + 1) * matrix.element_size()
        room = (MOST_BYTES - rows.nbytes) // bytes_per_column // 2
        start = max(0, min(column - room // 2, matrix.shape[-1] - room))
        args[first + 1] = matrix[..., start : start + room]
        # what is added to the product, before its operands, has the same columns unless it is broadcast
        if first and args[0].dim() and args[0].shape[-1] > 1:
            args[0] = args[0][..., start : start + room]
    trace = CallTrace(device)
    with torch.no_grad(), trace:
        results = each(call.operation(*args, **kwargs))
    traced = trace.finish(results[0])
    calls, result = read_calls(traced.text, traced.inputs)
    return traced, calls, run_exactly(calls, traced.inputs)[result]


def _as_tensors(traced: Traced) -> dict[str, torch.Tensor]:
    """Return calls and inputs as tensors of one file; the text of the calls is a tensor of bytes."""
    text = torch.frombuffer(bytearray(traced.text.encode()), dtype=torch.uint8)
    return {CALLS: text, **traced.inputs}


def _bytes(traced: Traced) -> int:
    return sum(tensor.nbytes for tensor in traced.inputs.values())
