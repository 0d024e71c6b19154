r"""Products of a half type by float32 kernels whose results are rounded: as matrix units compute, on any processor.

A processor without fast kernels of a half type multiplies matrices in it a hundred to ten thousand times as slowly as
in float32, because libraries then fall back to loops that nobody tuned. Matrix units, and the fast kernels, multiply
the operands exactly, accumulate in float32 and round once when they store. A float32 kernel on the widened operands,
rounded at the end, does the same: a product of two numbers of 8 or 11 bits is exact in float32's 24. So the error is of
the same kind: accumulation in some order in float32, and one rounding to the half type.

Only matrix products and convolutions are replaced. Every other operation of a half type is computed by the processor's
own kernels: these widen, compute and round too, one element at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.widening import Widening, each_tensor

HALF = frozenset({torch.bfloat16, torch.float16})

_aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
    }
)
"""Operations that every product of torch's public functions becomes when attention runs by its formula, which it is
pinned to."""


class RoundedProducts(DispatchMode):
    """Compute products of half types in float32 and round their results, while the mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._wide = Widening(torch.float32, HALF)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        half_types = (arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.dtype in HALF)
        dtype = next(half_types, None)
        if dtype is None:
            return func(*args, **kwargs)
        product = None if kwargs else self._wide.product(func, args)
        if product is None:  # no large weight: the operands are widened whole
            args, kwargs = each_tensor(self._wide.of, (args, kwargs))
            product = func(*args, **kwargs)
        return each_tensor(lambda value: value.to(dtype), product)
