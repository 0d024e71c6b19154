"""Compute float32 products as a unit does that rounds their operands: in TF32 or bfloat16, accumulated in float32.

The `relative` rule compares a device's error with that of rounding. Where a device may multiply in a lower precision,
the error that fits is that of the same products on the CPU: `ReducedProducts` sits below autograd and below torch's
composite operations, and rounds the operands of every matrix product and convolution, forward and backward, before the
CPU's float32 kernels multiply them. A product of two operands of 11 or 8 bits is exact in float32, so that this is what
such a unit computes, up to the order in which it adds.

Operands in TF32 are truncated: the wider of the two errors that units make (`consistency.numerics.precision`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.precision import Precision

_TF32_DROPPED = 13
"""Number of float32's 23 stored mantissa bits that TF32 does not have."""

_aten = torch.ops.aten

MATRIX_PRODUCTS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.mv.default: (0, 1),
    _aten.dot.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten.addbmm.default: (1, 2),
    _aten.addmv.default: (1, 2),
    _aten._addmm_activation.default: (1, 2),
}
_CONVOLUTION: dict[Any, tuple[int, ...]] = {
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
}
"""Convolutions, and where the operands that are multiplied are among the arguments; a bias is added, not rounded."""


def truncated_to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values without the mantissa bits that TF32 lacks; NaN and infinity stay."""
    cut = (values.contiguous().view(torch.int32) & ~((1 << _TF32_DROPPED) - 1)).view(torch.float32)
    return torch.where(torch.isfinite(values), cut, values)


def rounded_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values rounded to bfloat16, to nearest even."""
    return values.to(torch.bfloat16).to(torch.float32)


_ROUND: dict[Precision, Callable[[torch.Tensor], torch.Tensor]] = {
    Precision.FLOAT32: lambda values: values,
    Precision.TF32: truncated_to_tf32,
    Precision.BFLOAT16: rounded_to_bfloat16,
}


class ReducedProducts(DispatchMode):
    """Round the operands of float32 products while the mode is active.

    Attention has to be computed by its formula (`sdpa_math`): a fused kernel is one operation, whose inner products
    cannot be reached.
    """

    def __init__(self, *, matmul: Precision, convolution: Precision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._round = {
            **{func: (places, _ROUND[matmul]) for func, places in MATRIX_PRODUCTS.items()},
            **{func: (places, _ROUND[convolution]) for func, places in _CONVOLUTION.items()},
        }

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._round:
            places, round_operand = self._round[func]
            operands = list(args)
            for place, operand in enumerate(args):
                if place in places and _is_float32(operand):
                    operands[place] = round_operand(operand)
            args = tuple(operands)
        elif torch.is_inference_mode_enabled() and func._can_decompose():
            # inference mode leaves composite operations whole: their products are inside
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _is_float32(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


GROUPED = torch.ops.aten._grouped_mm.default
"""Multiplies groups of rows or columns, each by a matrix of its own: `offs` has the end of each group."""


def grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Compute `torch.ops.aten._grouped_mm` as one product per group; rows of no group are zero.

    Parameters
    ----------
    a, b : torch.Tensor
        `(groups, m, k)` and `(groups, k, n)`; where one has no first dimension, `offs` divides its rows (of `b`, its
        columns) into groups; where neither has, it divides the dimension that is summed.
    offs : torch.Tensor or None
        End of each group; None where both have a first dimension.
    bias, out_dtype : optional
        Added to the product, and the dtype of the result; None for neither.
    """
    if offs is None:
        return _finish(a @ b, bias, out_dtype)
    ends = offs.tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == 2 and b.dim() == 2:
        return _finish(torch.stack([a[:, part] @ b[part] for part in parts]), bias, out_dtype)
    if a.dim() == 2:
        product = a.new_zeros(a.shape[0], b.shape[-1])
        for group, part in enumerate(parts):
            product[part] = a[part] @ b[group]
        return _finish(product, bias, out_dtype)
    product = b.new_zeros(a.shape[1], b.shape[-1])
    for group, part in enumerate(parts):
        product[:, part] = a[group] @ b[:, part]
    return _finish(product, bias, out_dtype)


def _finish(product: torch.Tensor, bias: Any, dtype: Any) -> torch.Tensor:
    """Add the bias, if there is one, and convert to a dtype, if one is given."""
    result = product if bias is None else product + bias
    return result if dtype is None else result.to(dtype)
