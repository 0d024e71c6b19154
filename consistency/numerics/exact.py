"""Run real model code in float64 without a second copy of the model.

transformers casts to float32 in norms, rotary tables and softmax, so `model.double()` alone is no float64 reference.
`Float64Mode` sits below that code: every floating-point operand is widened when an operation uses it, and every cast or
factory that requests a narrower float gets float64. Parameters stay as they are stored; in addition to the model, only
the operands of one operation at a time exist in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})

# these compare the dtypes of their operands before they reach the dispatcher, where Float64Mode would widen them
_CHECKED_EARLY = frozenset((
    torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    torch.nn.functional.scaled_dot_product_attention,
))  # fmt: skip


class Float64Mode(TorchDispatchMode):
    """Compute in float64 while the mode is active.

    Views of parameters and writes into narrower tensors keep their dtype: widening would detach them from the storage
    that they share.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._early = _WidenEarly()

    def __enter__(self) -> Float64Mode:
        self._early.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._early.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        if _writes(func) or func.is_view:
            return self._in_place(func, args, kwargs)
        args, kwargs = tree_map(_widen, (args, kwargs))
        return func(*args, **kwargs)

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else None
        if _writes(func) and isinstance(target, torch.Tensor) and target.dtype == torch.float64:
            rest, kwargs = tree_map(_widen, (args[1:], kwargs))
            return func(target, *rest, **kwargs)
        return func(*args, **kwargs)


class _WidenEarly(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CHECKED_EARLY:
            args, kwargs = tree_map(_widen, (args, kwargs))
        return func(*args, **kwargs)


def in_float64(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with every floating-point operation in it done in float64."""
    with torch.no_grad(), Float64Mode():
        return function(*args, **kwargs)


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _widen(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value
