"""Read what a check needs to know of each tensor of an adapter's file: magnitudes, and where zeros lie. No torch here.

The bits of a float without its sign are ordered as its magnitude is. So the largest and the smallest magnitude are
those of unsigned integers, which NumPy finds at the speed of memory, in every float dtype; zeros are looked for only in
a tensor whose smallest magnitude is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from consistency.capture.names import adapter_place


@dataclass(frozen=True, slots=True)
class _FloatBits:
    """How a float dtype is stored: the unsigned integer of its width, its sign bit, and the bits of infinity."""

    integer: type[np.unsignedinteger]
    infinity: int

    @property
    def magnitude(self) -> int:
        """Return the mask of all bits but the sign."""
        return int(np.iinfo(self.integer).max) >> 1


_FLOATS = {
    "float64": _FloatBits(np.uint64, 0x7FF0_0000_0000_0000),
    "float32": _FloatBits(np.uint32, 0x7F80_0000),
    "bfloat16": _FloatBits(np.uint16, 0x7F80),
    "float16": _FloatBits(np.uint16, 0x7C00),
}

_BLOCK = 1 << 16
"""Elements that are looked at together: they stay in a cache between the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorContents:
    """The magnitudes of one tensor, and where its zeros lie.

    Attributes
    ----------
    key, layer, part : str
        Its name in the file; the layer that it belongs to; its name in that layer (`lora_A`).
    smallest, largest : float
        The smallest and the largest magnitude of its numbers, NaN and infinity left out.
    not_finite : int
        Elements that are NaN or infinite.
    rows, columns : numpy.ndarray
        Of a matrix: which rows, and which columns, have an element that is not zero, `(rows,)` and `(columns,)` bool;
        empty for other tensors.
    """

    key: str
    layer: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    smallest: float
    largest: float
    not_finite: int
    rows: np.ndarray
    columns: np.ndarray

    @property
    def is_zero(self) -> bool:
        """Report whether every element is zero."""
        return self.largest == 0 and not self.not_finite

    @property
    def is_one(self) -> bool:
        """Report whether every element has the magnitude one."""
        return self.smallest == self.largest == 1 and not self.not_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor as bytes: `raw` is uint8, one-dimensional; `dtype` has torch's name."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    raw: np.ndarray


def read_contents(tensors: Iterable[RawTensor]) -> list[TensorContents]:
    """Return the contents of floating-point tensors, in their order; tensors of other dtypes are left out."""
    return [_contents(tensor, _FLOATS[tensor.dtype]) for tensor in tensors if tensor.dtype in _FLOATS]


def by_layer(contents: Iterable[TensorContents]) -> Mapping[str, Mapping[str, TensorContents]]:
    """Return the tensors of each layer by their name in it."""
    layers: dict[str, dict[str, TensorContents]] = {}
    for tensor in contents:
        layers.setdefault(tensor.layer, {})[tensor.part] = tensor
    return layers


def _contents(tensor: RawTensor, bits: _FloatBits) -> TensorContents:
    values = tensor.raw.view(bits.integer)
    smallest, largest, not_finite = _magnitudes(values, bits)
    rows = columns = np.zeros(0, bool)
    if len(tensor.shape) == 2:
        rows, columns = np.ones(tensor.shape[0], bool), np.ones(tensor.shape[1], bool)
        if smallest == 0:
            is_held = (values & bits.integer(bits.magnitude)).reshape(tensor.shape) != 0
            rows, columns = is_held.any(axis=1), is_held.any(axis=0)
    layer, part = adapter_place(tensor.key)
    return TensorContents(
        key=tensor.key,
        layer=layer,
        part=part,
        shape=tensor.shape,
        dtype=tensor.dtype,
        smallest=_number(smallest, tensor.dtype),
        largest=_number(largest, tensor.dtype),
        not_finite=not_finite,
        rows=rows,
        columns=columns,
    )


def _magnitudes(values: np.ndarray, bits: _FloatBits) -> tuple[int, int, int]:
    """Return the bits of the smallest and the largest finite magnitude, and how many elements are not finite."""
    smallest, largest, not_finite = bits.infinity, 0, 0
    memory = np.empty(_BLOCK, bits.integer)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        magnitudes = np.bitwise_and(block, bits.integer(bits.magnitude), out=memory[: len(block)])
        if int(magnitudes.max()) >= bits.infinity:
            is_finite = magnitudes < bits.infinity
            not_finite += len(block) - int(np.count_nonzero(is_finite))
            magnitudes = magnitudes[is_finite]
            if not len(magnitudes):
                continue
        smallest = min(smallest, int(magnitudes.min()))
        largest = max(largest, int(magnitudes.max()))
    return min(smallest, largest), largest, not_finite


def _number(bits: int, dtype: str) -> float:
    """Return the float that has these bits."""
    if dtype == "bfloat16":  # the upper half of a float32
        bits, dtype = bits << 16, "float32"
    value = float(np.array(bits, _FLOATS[dtype].integer).view(dtype))
    return value if math.isfinite(value) else 0.0
