"""What the blind-spot set does to a tensor: from the expected one to the actual one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tests.numerics.references import (
    MANTISSA_BITS,
    OTHER_PLACE,
    PLACE,
    Bits,
    another,
    bits_of,
    infinity,
    nan,
    tensor_of,
    width_of,
)

Change = Callable[[torch.Tensor], torch.Tensor]
"""From the expected tensor to the actual one; the expected one stays as it is."""

PAGE_BYTES = 4096


def on_bits(edit: Callable[[Bits, torch.Tensor], None]) -> Change:
    """Return a change that edits the bit patterns in place."""

    def change(expected: torch.Tensor) -> torch.Tensor:
        bits = bits_of(expected)
        edit(bits, expected)
        return tensor_of(bits, expected)

    return change


def flip(bit: Callable[[torch.Tensor], int], *places: int) -> Change:
    """Return a change that flips one bit of the real part at each place."""

    def edit(bits: Bits, expected: torch.Tensor) -> None:
        for place in places:
            bits[place] ^= bits.dtype.type(1 << bit(expected))

    return on_bits(edit)


def put(pattern: Callable[[torch.Tensor], int]) -> Change:
    """Return a change that puts a bit pattern at `PLACE`."""

    def edit(bits: Bits, expected: torch.Tensor) -> None:
        bits[PLACE] = pattern(expected)

    return on_bits(edit)


def lowest(_: torch.Tensor) -> int:
    return 0


def sign(tensor: torch.Tensor) -> int:
    return width_of(tensor) - 1


def exponent(tensor: torch.Tensor) -> int:
    return MANTISSA_BITS[tensor.dtype]


def top_exponent(tensor: torch.Tensor) -> int:
    return width_of(tensor) - 2


def in_float64(function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change that is computed in double precision and rounded once."""

    def change(expected: torch.Tensor) -> torch.Tensor:
        wide = torch.complex128 if expected.is_complex() else torch.float64
        return function(expected.to(wide)).to(expected.dtype)

    return change


def through(dtype: torch.dtype) -> Change:
    """Return a change that rounds each real part to a narrower format and back."""

    def change(expected: torch.Tensor) -> torch.Tensor:
        real = torch.view_as_real(expected) if expected.is_complex() else expected
        back = real.to(dtype).to(real.dtype)
        return torch.view_as_complex(back) if expected.is_complex() else back

    return change


def ending_in(bits: Bits, low: int, *, after: int) -> int:
    """Find the first place from `after` on whose two lowest bits are `low`."""
    return after + int(np.flatnonzero(bits[after:] % 4 == low)[0])


@on_bits
def step_one(bits: Bits, _: torch.Tensor) -> None:
    bits[ending_in(bits, 0, after=PLACE)] += bits.dtype.type(1)  # NumPy 1 makes float64 of uint64 and an int


@on_bits
def step_with_carry(bits: Bits, _: torch.Tensor) -> None:
    bits[ending_in(bits, 1, after=PLACE)] += bits.dtype.type(1)


@on_bits
def step_all(bits: Bits, _: torch.Tensor) -> None:
    bits += 1


@on_bits
def step_up_and_down(bits: Bits, _: torch.Tensor) -> None:
    up, down = ending_in(bits, 0, after=PLACE), ending_in(bits, 1, after=OTHER_PLACE)
    one = bits.dtype.type(1)
    while bits[down] == bits[up] + one:  # that would be a swap
        down = ending_in(bits, 1, after=down + 1)
    bits[up] += one
    bits[down] -= one


@on_bits
def two_bits_of_one(bits: Bits, _: torch.Tensor) -> None:
    bits[PLACE] ^= bits.dtype.type(0b1010)


@on_bits
def other_payload(bits: Bits, expected: torch.Tensor) -> None:
    below_quiet = (1 << (MANTISSA_BITS[expected.dtype] - 1)) - 1
    bits[PLACE] ^= bits.dtype.type(below_quiet)


@on_bits
def nan_unlike_a_flip(bits: Bits, expected: torch.Tensor) -> None:
    pattern = nan(expected)
    far = (int(np.bitwise_xor(bits[i], bits.dtype.type(pattern))).bit_count() > 1 for i in range(PLACE, bits.size))
    bits[PLACE + next(i for i, several in enumerate(far) if several)] = pattern


@on_bits
def largest_finite(bits: Bits, expected: torch.Tensor) -> None:
    bits[PLACE] = infinity(expected) - 1


def swap_elements(expected: torch.Tensor) -> torch.Tensor:
    rows = bits_of(expected).reshape(expected.numel(), -1)  # a complex element stays together
    other = OTHER_PLACE + int(np.flatnonzero((rows[OTHER_PLACE:] != rows[PLACE]).any(axis=1))[0])
    rows[[PLACE, other]] = rows[[other, PLACE]]
    return tensor_of(rows.reshape(-1), expected)


def swap_rows(expected: torch.Tensor) -> torch.Tensor:
    rows = bits_of(expected).reshape(expected.shape[0], -1)
    rows[[5, 200]] = rows[[200, 5]]
    return tensor_of(rows.reshape(-1), expected)


def repeat_row(expected: torch.Tensor) -> torch.Tensor:
    rows = bits_of(expected).reshape(expected.shape[0], -1)
    rows[6] = rows[5]
    return tensor_of(rows.reshape(-1), expected)


def shift(expected: torch.Tensor) -> torch.Tensor:
    step = 2 if expected.is_complex() else 1
    return tensor_of(np.roll(bits_of(expected), step), expected)


@on_bits
def page_of_another(bits: Bits, expected: torch.Tensor) -> None:
    count = PAGE_BYTES // bits.itemsize
    bits[count : 2 * count] = bits_of(another(expected.dtype))[count : 2 * count]


@on_bits
def page_of_noise(bits: Bits, _: torch.Tensor) -> None:
    noise = np.random.Generator(np.random.PCG64(3)).bytes(PAGE_BYTES)
    count = PAGE_BYTES // bits.itemsize
    bits[count : 2 * count] = np.frombuffer(noise, dtype=bits.dtype)


@on_bits
def cut_short(bits: Bits, _: torch.Tensor) -> None:
    bits[-2048:] = 0


@on_bits
def flush_subnormals(bits: Bits, expected: torch.Tensor) -> None:
    mantissa = MANTISSA_BITS[expected.dtype]
    beyond_sign = bits.dtype.type((1 << (width_of(expected) - 1)) - 1)
    bits[(bits & beyond_sign) < (1 << mantissa)] &= ~beyond_sign


@on_bits
def to_tf32(bits: Bits, _: torch.Tensor) -> None:
    # 10 of 23 mantissa bits stay; to nearest, ties to even
    bits += np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    bits &= np.uint32(0xFFFFE000)


@on_bits
def cut_to_tf32(bits: Bits, _: torch.Tensor) -> None:
    bits &= np.uint32(0xFFFFE000)


@on_bits
def cut_to_bfloat16(bits: Bits, _: torch.Tensor) -> None:
    bits &= np.uint32(0xFFFF0000)


def ten_thousand(expected: torch.Tensor) -> torch.Tensor:
    actual = expected.clone()
    actual.view(-1)[PLACE] = torch.tensor(1e4, dtype=torch.float64).to(expected.dtype)
    return actual


def another_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a matrix so that its columns lie one after the other."""
    return tensor.t().contiguous().t()


def from_the_middle(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to an address that is no multiple of eight."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    room[1:].copy_(tensor.reshape(-1))
    return room[1:].view(tensor.shape)


def conjugate_twice(tensor: torch.Tensor) -> torch.Tensor:
    return torch.conj_physical(tensor).conj()
