r"""Quantized weights by their formulas: the values that their bytes stand for, and how far quantizing may move them.

A quantized weight stores, for each block of values, a scale s, and for each value the number of a level
:math:`\ell_k`; the value is :math:`\ell_k s`. Levels are integers, the numbers of an 8-bit float, or a table.

**Dequantized.** `exact` is that product in float64, `rounded` what an implementation gives that rounds after each of
the format's own steps: the product is one rounding in float32, and the store another one in a half type. An
implementation that multiplies in another order or dtype differs from it by no more than `dequantized_allowance`.

**Requantized.** A merge dequantizes, adds a delta, and quantizes the sum. Quantizing x gives the nearest level, so the
error is at most half the distance of the two levels around x/s, half a *step*:
:math:`|q(x) - x| \le (\ell_{k+1} - \ell_k)\,s/2`. Of a value that the device has summed with an error e instead of x:
the nearest level is at most e farther, the value e nearer to it, and the block's scale, which follows from its largest
value, off by at most the largest e in the block. So `requantized_allowance` is half a step, 2e, and that. Nothing else
is allowed: a value that is cut to the level below it is off by up to a whole step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF

_FLOAT32 = UNIT_ROUNDOFF[torch.float32]
_EIGHTH_BITS = 7.874015718698502e-3
"""1/127 in float32, by which bitsandbytes multiplies: as it is in its source."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Levels of bitsandbytes' nf4, as its source has them; its blocks have 64 values."""

FP4 = (0.0, 0.0052083333, 0.16666667, 0.25, 0.33333333, 0.5, 0.66666667, 1.0)
"""Levels of bitsandbytes' fp4 without their signs, as its source has them."""

_NESTED_BLOCK = 256
"""Scales that share a scale, where scales are quantized too; fixed in bitsandbytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requantized:
    """The tolerance of quantizing exact values: float64, of the weight's shape."""

    step: torch.Tensor
    """Distance of the two levels around each value."""
    allowed: torch.Tensor
    """The error that each quantized value may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight(ABC):
    """A quantized weight, given by its stored parts; a subclass for each format."""

    parts: Mapping[str, torch.Tensor]
    """Codes, scales and tables, by the names that the format gives them."""
    shape: tuple[int, ...]
    """Shape of the dequantized weight."""
    dtype: torch.dtype
    """Dtype that it is dequantized to."""

    def on_cpu(self) -> QuantizedWeight:
        """Return the same weight with its parts on the CPU."""
        return replace(self, parts={name: part.detach().to("cpu") for name, part in self.parts.items()})

    def of(self, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Return the weight with some of its parts replaced."""
        return replace(self, parts={**self.parts, **parts})

    def exact(self) -> torch.Tensor:
        """Return the weight in float64."""
        return self._values(torch.float64)

    def rounded(self) -> torch.Tensor:
        """Return the weight in its dtype, rounded after each step of the format."""
        return self._values(torch.float32).to(self.dtype)

    def dequantized_allowance(self, exact: torch.Tensor) -> torch.Tensor:
        """Return how far the value of an implementation may be from `exact`, of each element.

        Level, scale and product are each rounded, and the store: four roundings, in float32 or in the dtype itself. A
        scale that is a sum has the error of that sum besides, and no level is larger than one.
        """
        u = max(_FLOAT32, UNIT_ROUNDOFF[self.dtype])
        return exact.abs().mul_(4 * u).add_(HALF_SMALLEST_SUBNORMAL[self.dtype] + 4 * self._scale_error())

    def requantized(self, exact: torch.Tensor, error: torch.Tensor) -> Requantized:
        """Return the tolerance of quantizing values that are known to within `error`.

        Parameters
        ----------
        exact, error : torch.Tensor
            Float64, on the CPU, of the weight's shape.
        """
        step, scale_error = self._steps(exact, error)
        # the weight that comes out is rounded once more where it is dequantized
        dequantizing_error = self.dequantized_allowance(exact)
        return Requantized(step=step, allowed=step / 2 + 2 * error + scale_error + dequantizing_error)

    @abstractmethod
    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, computed step by step in a dtype."""

    @abstractmethod
    def _steps(self, exact: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each value the distance of the levels around it, and the error that the scale's error makes."""

    def _scale_error(self) -> float:
        """Return the absolute rounding error of a scale that is a sum, in float32."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBit(QuantizedWeight):
    """4-bit codes of bitsandbytes, two in a byte: `codes`, `absmax` and `table`.

    Where the scales are quantized too, `absmax` has their codes, `nested_table` their levels, `nested_absmax` the
    scales of the scales, and `offset` the number that is added to all scales.
    """

    block: int
    """Values that share a scale."""

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        packed = self.parts["codes"].reshape(-1).view(torch.uint8)
        codes = torch.stack((packed >> 4, packed & 15), dim=1).reshape(-1)[: math.prod(self.shape)]
        values = self.parts["table"].to(dtype)[codes.long()]
        return _times(values, self._scales(dtype), self.block).reshape(self.shape)

    def _scales(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the scale of each block, dequantized itself where scales are quantized too."""
        scales = self.parts["absmax"].reshape(-1)
        if "nested_absmax" not in self.parts:
            return scales.to(dtype)
        levels = self.parts["nested_table"].to(dtype)[scales.long()]
        return _times(levels, self.parts["nested_absmax"].to(dtype), _NESTED_BLOCK) + self.parts["offset"].to(dtype)

    def _scale_error(self) -> float:
        return 0.0 if "offset" not in self.parts else 2 * _FLOAT32 * abs(float(self.parts["offset"]))

    def _steps(self, exact: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, errors = _blocks(exact.reshape(-1), self.block), _blocks(error.reshape(-1), self.block)
        scales = blocks.abs().amax(dim=1)
        scale_errors = errors.amax(dim=1) + 2 * _FLOAT32 * scales
        if "nested_absmax" in self.parts:
            scale_errors = scale_errors + self._nested_error(scales, scale_errors)
        levels = self.parts["table"].to(torch.float64).unique()
        # a block of zeros has the scale zero: its values are at level zero
        low, high = _around(blocks / scales.clamp(min=torch.finfo(torch.float64).tiny)[:, None], levels)
        step = (high - low) * scales[:, None]
        level_error = torch.maximum(low.abs(), high.abs()) * scale_errors[:, None]
        return _without_padding(step, exact), _without_padding(level_error, exact)

    def _nested_error(self, scales: torch.Tensor, scale_errors: torch.Tensor) -> torch.Tensor:
        """Bound the error of quantizing the scales: half of their own step, and the effect of their own errors."""
        offset = scales.mean()
        centered = _blocks(scales - offset, _NESTED_BLOCK)
        largest = centered.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        low, high = _around(centered / largest, self.parts["nested_table"].to(torch.float64).unique())
        half_step = ((high - low) * largest / 2).reshape(-1)[: scales.numel()]
        # the largest and the offset are off by as much as any scale, and a scale's own error may cross a level
        return half_step + 4 * scale_errors.amax()


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBit(QuantizedWeight):
    """8-bit rows of bitsandbytes: `codes`, and in `absmax` the largest magnitude of each row."""

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.parts["codes"].to(dtype) * self.parts["absmax"].to(dtype).reshape(-1, 1) * _EIGHTH_BITS

    def _steps(self, exact: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # bitsandbytes casts to float16 before it quantizes: each value is rounded, the largest of a row among them
        cast_error = exact.abs() * UNIT_ROUNDOFF[torch.float16] + HALF_SMALLEST_SUBNORMAL[torch.float16]
        largest = exact.abs().amax(dim=1, keepdim=True)
        largest_error = error.amax(dim=1, keepdim=True) + cast_error.amax(dim=1, keepdim=True) + 4 * _FLOAT32 * largest
        fraction = exact.abs() / largest.clamp(min=torch.finfo(torch.float64).tiny)
        return (largest / 127).expand_as(exact), 2 * cast_error + fraction * largest_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine(QuantizedWeight):
    """Integers of torchao: `(qdata - zero_point) * scale`, with a scale for each block."""

    block: tuple[int, ...]
    """Shape of a block: rows and columns."""
    lowest: int
    highest: int
    """`lowest`, `highest`: the range of the integers."""

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        codes = self.parts["qdata"].to(dtype)
        if "zero_point" in self.parts:
            codes = codes - _spread(self.parts["zero_point"].to(dtype), self.shape)
        return codes * _spread(self.parts["scale"].to(dtype), self.shape)

    def _steps(self, exact: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u = max(_FLOAT32, UNIT_ROUNDOFF.get(self.parts["scale"].dtype, 0.0))
        points = self.parts.get("zero_point")
        if points is None or not points.any():
            # the widest of torchao's symmetric scales: the largest magnitude on the highest integer
            scales = _by_block(exact.abs(), self.block).amax(dim=-1) / self.highest
        else:
            values = _by_block(exact, self.block)
            span = values.amax(dim=-1).clamp(min=0) - values.amin(dim=-1).clamp(max=0)
            scales = span / (self.highest - self.lowest)
        scale_errors = _by_block(error, self.block).amax(dim=-1) + (4 * u * self.highest) * scales
        scales = scales.clamp(min=torch.finfo(torch.float32).eps)  # torchao has no smaller scale
        return _spread(scales, self.shape), _spread(scale_errors, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8(QuantizedWeight):
    """8-bit floats of torchao: `qdata * scale`, with a scale for each block."""

    block: tuple[int, ...]
    """Shape of a block: rows and columns."""

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.parts["qdata"].to(dtype) * _spread(self.parts["scale"].to(dtype), self.shape)

    def _steps(self, exact: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kind = self.parts["qdata"].dtype
        largest = _by_block(exact.abs(), self.block).amax(dim=-1)
        scales = (largest / torch.finfo(kind).max).clamp(min=torch.finfo(torch.float64).tiny)
        largest_error = _by_block(error, self.block).amax(dim=-1) + 4 * _FLOAT32 * largest
        # the levels are all numbers of the 8-bit float
        levels = torch.arange(256, dtype=torch.uint8).view(kind).to(torch.float64)
        spread = _spread(scales, self.shape)
        low, high = _around(exact / spread, levels[levels.isfinite()].unique())
        fraction = exact.abs() / _spread(largest, self.shape).clamp(min=torch.finfo(torch.float64).tiny)
        return (high - low) * spread, fraction * _spread(largest_error, self.shape)


def _around(values: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels on both sides of each value; for a value beyond the last level, the last two."""
    above = torch.bucketize(values.contiguous(), levels).clamp(1, len(levels) - 1)
    return levels[above - 1], levels[above]


def _without_padding(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `(blocks, values)` in the shape of a weight, without the zeros that fill the last block."""
    return blocks.reshape(-1)[: like.numel()].reshape(like.shape)


def _blocks(flat: torch.Tensor, size: int) -> torch.Tensor:
    """Return `(blocks, size)`, the last one filled with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).reshape(-1, size)


def _times(values: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply flat values by the scales of their blocks of `size`."""
    return (_blocks(values, size) * scales[:, None]).reshape(-1)[: values.numel()]


def _by_block(values: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """Return the values of a matrix by block: `(rows of blocks, columns of blocks, values)`."""
    rows, columns = values.shape
    high, wide = block
    parts = values.reshape(rows // high, high, columns // wide, wide).transpose(1, 2)
    return parts.reshape(rows // high, columns // wide, high * wide)


def _spread(scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of each element of a matrix from those of its blocks."""
    if scales.dim() != len(shape):
        return scales.expand(shape)
    for dim, size in enumerate(shape):
        scales = scales.repeat_interleave(size // scales.shape[dim], dim=dim)
    return scales
