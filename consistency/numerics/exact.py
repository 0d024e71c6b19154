"""Run real model code in float64 without a second copy of the model.

transformers casts to float32 in norms, rotary tables and softmax, so `model.double()` alone is no float64 reference.
`Float64Mode` sits below that code: every floating-point operand is widened when an operation uses it, and every cast or
factory that requests a narrower float gets float64. Parameters stay as they are stored; in addition to the model, only
the operands of one operation at a time exist in float64, of a large weight a part (`Widening`). What is only selected
from a table, the rows of an embedding, is widened after it is selected.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.identity import storage_of
from consistency.numerics.reduced_products import GROUPED, grouped_product
from consistency.numerics.widening import Widening, each_tensor

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether a gradient may have another dtype than its parameter: from torch 2.10 on."""

_LARGE = 1 << 22
"""Elements from which no float64 copy of a parameter is made: 32 MiB, as whole embeddings and heads have and more."""

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})

# these compare the dtypes of their operands before they reach the dispatcher, where Float64Mode would widen them
_CHECKED_EARLY = frozenset(
    (
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
        torch.nn.functional.scaled_dot_product_attention,
        torch.prelu,
    )
)

_aten = torch.ops.aten
_SELECTING = frozenset({_aten.embedding.default, _aten.index_select.default, _aten.gather.default})


class Float64Mode(DispatchMode):
    """Compute in float64 while the mode is active.

    Views of parameters and writes into narrower tensors keep their dtype: widening would detach them from the storage
    that they share. Autograd rounds a gradient to the dtype of what it belongs to, so for a backward pass in float64
    the views of the parameters that have gradients pass for float64 (`with_gradients`).
    """

    _lock, _entered = threading.Lock(), 0
    """Guard and count of the active modes: threads may be in such modes at once, as merges of several tensors are."""
    _registering: Callable[..., Any]
    """Torch's own `register_parametrization`, kept while a mode replaces it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._early = _WidenEarly()
        self._wide = Widening(torch.float64, _NARROW)
        self._with_gradients: frozenset[int] = frozenset()
        self._paused = False
        self.operations = 0
        """Operations that were called in the mode."""

    @property
    def has_kernels(self) -> bool:
        """Report whether convolutions or attention were computed, which devices have kernels of their own for."""
        return self._early.widened

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compute in the operands' own dtypes inside the mode."""
        was_paused = self._paused
        self._paused = self._early.paused = True
        try:
            yield
        finally:
            self._paused = self._early.paused = was_paused

    @contextmanager
    def with_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Let parameters on the CPU have float64 gradients, whatever their dtype is.

        Small ones are float64 meanwhile, which suits any operation. Of large ones there is no second copy: torch is
        told that their gradients may have another dtype, and their views pass for float64.
        """
        large: list[torch.nn.Parameter] = []
        small: list[torch.nn.Parameter] = []
        for parameter in parameters:
            is_large = HAS_GRAD_DTYPE and parameter.numel() >= _LARGE
            (large if is_large else small).append(parameter)
        stored_data = [(parameter, parameter.data) for parameter in small]
        self._with_gradients = frozenset(storage_of(parameter) for parameter in large)
        torch_new = torch.nn.Parameter.__new__

        def without_gradient(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:  # noqa: ARG001 - torch's
            return torch_new(cls, data, False)

        # a parameter made in the pass, as PEFT's `transpose` makes one of a view, is narrow, and nobody asks for its
        # gradient: autograd would refuse the one in float64
        with mock.patch.object(torch.nn.Parameter, "__new__", without_gradient):
            try:
                for parameter, data in stored_data:
                    parameter.data = data.to(torch.float64)
                for parameter in large:
                    parameter.grad_dtype = None
                yield
            finally:
                self._with_gradients = frozenset()
                for parameter, data in stored_data:
                    parameter.data = data
                for parameter in large:
                    parameter.grad_dtype = parameter.dtype

    def __enter__(self) -> Float64Mode:
        # PEFT parametrizes expert weights for a pass; torch refuses a parametrization that changes the dtype
        with self._lock:
            if not Float64Mode._entered:
                Float64Mode._registering = staticmethod(parametrize.register_parametrization)
                parametrize.register_parametrization = functools.partial(self._registering, unsafe=True)
            Float64Mode._entered += 1
        self._early.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._early.__exit__(*error)  # type: ignore[no-untyped-call]
        with self._lock:
            Float64Mode._entered -= 1
            if not Float64Mode._entered:
                parametrize.register_parametrization = self._registering

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.operations += 1
        if self._paused:
            return func(*args, **kwargs)
        if kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        # a view of a parameter with a gradient passes for float64, so that autograd does not round the gradient
        if func.is_view and (isinstance(args[0], _WideView) or self._has_gradient(args[0])):
            return each_tensor(_wide_view, func(_narrow(args[0]), *args[1:], **kwargs))
        if self._with_gradients:
            args, kwargs = each_tensor(_narrow, args), dict(each_tensor(_narrow, kwargs))
        # to widen the target of a write, or the base of a view, would detach it from its storage
        if _writes(func) or func.is_view:
            return self._in_place(func, args, kwargs)
        if func in _SELECTING:  # the rows that are selected are widened, and not the whole table
            return _widen(func(*args, **kwargs))
        # a large weight is widened part by part
        product = None if kwargs else self._wide.product(func, args)
        if product is not None:
            return product
        args, kwargs = each_tensor(self._wide.of, (args, kwargs))
        result = grouped_product(*args, **kwargs) if func is GROUPED else func(*args, **kwargs)
        # an operation without operands, as one that makes zeros, has torch's default dtype
        return _widen(result)

    def _has_gradient(self, value: Any) -> bool:
        """Report whether a tensor shares the memory of a large parameter that has a float64 gradient."""
        if not self._with_gradients or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        return storage_of(value) in self._with_gradients

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation that writes or is a view; one that writes into float64 gets widened operands."""
        target = args[0] if args else None
        if _writes(func) and isinstance(target, torch.Tensor) and target.dtype == torch.float64:
            further_args, kwargs = each_tensor(_widen, (args[1:], kwargs))
            return func(target, *further_args, **kwargs)
        return func(*args, **kwargs)


class _WideView(torch.Tensor):
    """A view of a narrow parameter that autograd takes for float64, so that its gradient is not rounded.

    It has no memory of its own: the operation that uses it widens the elements, as those of any other operand.
    """

    elements: torch.Tensor
    # results are plain tensors; torch annotates this as a method with one argument more
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, narrow: torch.Tensor) -> _WideView:
        view: _WideView = torch.Tensor._make_wrapper_subclass(
            cls, narrow.shape, narrow.stride(), narrow.storage_offset(), dtype=torch.float64, device=narrow.device
        )
        view.elements = narrow
        return view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation leaves the operation out
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} got a view of a parameter outside the mode that widens it")


class _WidenEarly(TorchFunctionMode):
    """Widen the operands of functions that compare dtypes before the dispatcher: see `_CHECKED_EARLY`."""

    paused = False
    widened = False
    """Whether there was such a function."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CHECKED_EARLY and not self.paused:
            self.widened = True
            args, kwargs = each_tensor(_widen, (args, kwargs))
        return func(*args, **kwargs)


def in_float64(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with every floating-point operation in it done in float64."""
    with torch.no_grad(), Float64Mode():
        return function(*args, **kwargs)


def _wide_view(value: Any) -> Any:
    """Return a narrow tensor as a view that passes for float64; anything else as it is."""
    return _WideView(value) if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value


def _narrow(value: Any) -> Any:
    """Return the elements of a view that passes for float64; anything else as it is."""
    return value.elements if isinstance(value, _WideView) else value


def _writes(func: Any) -> bool:
    """Report whether an operation writes into an operand."""
    return bool(func._schema.is_mutable)


def _widen(value: Any) -> Any:
    """Return a narrow tensor in float64; anything else as it is."""
    return value.to(torch.float64) if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value
