"""Expected tensors for the blind-spot set, and their bits.

Every number comes from NumPy's generators, for torch's own differ between kernels; and bits are read and written by
NumPy, for the code under test may have no part in its own test.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Bits = np.ndarray
"""The bit patterns of a tensor's real parts, flat, as unsigned integers of their width."""

Reference = Callable[[torch.dtype], torch.Tensor]

SHAPE = (320, 64)
"""20480 elements: five pages of 4096 bytes where elements have one byte, and more than one chunk of `measure`."""

PLACE, OTHER_PLACE = 777, 13000
"""Where single elements are changed: in the midst of a row, far apart, in different pages."""

MANTISSA_BITS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
    torch.complex64: 23,
}
"""Stored mantissa bits; of a complex number those of a part."""


def bits_of(tensor: torch.Tensor) -> Bits:
    """Copy out the bit patterns of a tensor's real parts, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    real = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
    return real.view(torch.uint8).numpy().view(f"u{real.element_size()}").copy()


def tensor_of(bits: Bits, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor of bit patterns, with the dtype and shape of another."""
    return torch.from_numpy(bits.view(np.uint8).copy()).view(like.dtype).reshape(like.shape)


# --- references -----------------------------------------------------------------------------------------------------


def numbers(dtype: torch.dtype, *, shape: tuple[int, ...] = SHAPE, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Make numbers of both signs: normally distributed, or integers, or two of three False."""
    stream = np.random.Generator(np.random.PCG64(seed))
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(stream.integers(0, 3, size=shape) == 0))
    if not dtype.is_floating_point and not dtype.is_complex:
        most = 100 if dtype == torch.int8 else 2**40  # one more or less does not wrap, and float64 holds it exactly
        return torch.from_numpy(np.asarray(stream.integers(-most, most, size=shape))).to(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(torch.from_numpy(stream.standard_normal((*shape, 2)) * scale).float())
    return torch.from_numpy(np.asarray(stream.standard_normal(shape) * scale)).to(dtype)


def another(dtype: torch.dtype) -> torch.Tensor:
    """Make another tensor of the same run."""
    return numbers(dtype, seed=1)


def square(dtype: torch.dtype) -> torch.Tensor:
    return numbers(dtype, shape=(144, 144))


def column(dtype: torch.dtype) -> torch.Tensor:
    return numbers(dtype, shape=(20_480, 1))


def scalar(dtype: torch.dtype) -> torch.Tensor:
    return numbers(dtype, shape=())


def odd(dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor whose last element lies outside the last whole word of eight bytes, where elements are narrower."""
    return numbers(dtype, shape=(7, 3))


def large(dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of more elements than float32 can count one by one."""
    return numbers(dtype, shape=(2**24 + 3,))


def tiny(dtype: torch.dtype) -> torch.Tensor:
    """Make numbers below the smallest normal one of float16, 6.1e-5: there it keeps fewer bits than TF32 does."""
    return numbers(dtype, scale=1e-6)


def holding(pattern: Callable[[torch.Tensor], int]) -> Reference:
    """Return a reference that holds a bit pattern at `PLACE`."""

    def make(dtype: torch.dtype) -> torch.Tensor:
        plain = numbers(dtype)
        bits = bits_of(plain)
        bits[PLACE] = pattern(plain)
        return tensor_of(bits, plain)

    return make


def with_subnormals(dtype: torch.dtype) -> torch.Tensor:
    """Make numbers of which every hundredth is subnormal."""
    plain = numbers(dtype)
    bits = bits_of(plain)
    few = bits[::100]
    stream = np.random.Generator(np.random.PCG64(2))
    few[:] = stream.integers(1, 1 << MANTISSA_BITS[dtype], size=few.shape).astype(bits.dtype)
    return tensor_of(bits, plain)


# --- patterns -------------------------------------------------------------------------------------------------------


def width_of(tensor: torch.Tensor) -> int:
    """Return the bits of a real part."""
    return 4 * tensor.element_size() if tensor.is_complex() else 8 * tensor.element_size()


def zero(_: torch.Tensor) -> int:
    return 0


def infinity(tensor: torch.Tensor) -> int:
    mantissa = MANTISSA_BITS[tensor.dtype]
    return ((1 << (width_of(tensor) - 1 - mantissa)) - 1) << mantissa


def nan(tensor: torch.Tensor) -> int:
    """Return the quiet NaN that processors make; e4m3fn has but one, all ones."""
    if tensor.dtype == torch.float8_e4m3fn:
        return 0x7F
    return infinity(tensor) | 1 << (MANTISSA_BITS[tensor.dtype] - 1)


def below_two(tensor: torch.Tensor) -> int:
    """Return the largest number below 2: with the top bit of its exponent set it is NaN in every dtype."""
    return (1 << (width_of(tensor) - 2)) - 1
