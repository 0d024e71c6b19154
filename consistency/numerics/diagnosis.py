"""A diagnosis, and the parts of its rules that are the same for moved and for computed tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.numerics import words
from consistency.numerics.words import Word

FEW_ELEMENTS = 64
"""Most elements with a flipped bit: a memory or link fault flips single bits in a few words; more wrong elements have
another cause."""

PAGE_BYTES = 4096
"""Size of a page of memory: a range of whole pages points to a mapping, not to a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A word of the report's vocabulary and its evidence."""

    word: Word
    evidence: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[], Diagnosis | None]


def first_answer(rules: Iterable[Rule]) -> Diagnosis | None:
    """Return the answer of the first rule that has one; rules go from the most to the least specific."""
    for rule in rules:
        answer = rule()
        if answer is not None:
            return answer
    return None


def bit_flip(dtype: torch.dtype, bits: Iterable[int], evidence: dict[str, Any]) -> Diagnosis:
    """Report single flipped bits, and the fields of a float that they are in.

    Parameters
    ----------
    bits : iterable of int
        Numbers of the bits, 0 for the least significant; a bit may occur several times.
    evidence : dict
        More evidence, which is added.
    """
    distinct_bits = sorted(set(bits))
    all_evidence = {"bits": distinct_bits, **evidence}
    if dtype.is_floating_point:
        all_evidence["fields"] = sorted({bit_field(dtype, bit) for bit in distinct_bits})
    return Diagnosis(word=words.BIT_FLIP, evidence=all_evidence)


def bit_field(dtype: torch.dtype, bit: int) -> str:
    """Return whether a bit of a float is its `sign`, `exponent` or `mantissa`; 0 is the least significant."""
    width = torch.finfo(dtype).bits
    # eps is the distance from 1 to the next number: 2 to the minus number of stored mantissa bits
    mantissa = round(-math.log2(torch.finfo(dtype).eps))
    has_sign = torch.finfo(dtype).min < 0  # an E8M0 scale is an exponent alone
    if has_sign and bit == width - 1:
        return "sign"
    return "exponent" if bit >= mantissa else "mantissa"


def non_finite(nan: int, inf: int) -> Diagnosis | None:
    """Report NaN and infinity where the reference is finite, by the number of both; None where there are none."""
    if nan + inf == 0:
        return None
    return Diagnosis(word=words.NON_FINITE, evidence={"nan": nan, "inf": inf})


def block(first: int, last: int, *, wrong: int, elements: int, size: int) -> Diagnosis | None:
    """Report one contiguous range of wrong elements; None where the wrong ones are no such range.

    Parameters
    ----------
    first, last : int
        Numbers of the first and the last wrong element.
    wrong, elements : int
        Number of wrong elements, and of all.
    size : int
        Bytes of an element.
    """
    length = last - first + 1
    # random data of the same exponent range agrees in some elements by chance, seldom in one of ten
    if length < 2 or length == elements or wrong < 0.9 * length:
        return None
    return Diagnosis(word=words.BLOCK, evidence=byte_range(first, last, elements=elements, size=size))


def byte_range(first: int, last: int, *, elements: int, size: int) -> dict[str, Any]:
    """Return the range of bytes from one element to another, and whether it consists of whole pages.

    Parameters
    ----------
    first, last : int
        Numbers of the first and the last element.
    elements, size : int
        Number of elements of the tensor, and bytes of each.
    """
    offset, stop = first * size, (last + 1) * size
    return {
        "offset_bytes": offset,
        "length_bytes": stop - offset,
        "page_aligned": offset % PAGE_BYTES == 0 and (stop % PAGE_BYTES == 0 or stop == elements * size),
    }


_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Stored mantissa bits of each dtype."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """One way to round numbers to a format: `how` is `nearest` or `truncated`, `mantissa` the format's stored bits."""

    word: Word
    how: str
    mantissa: int
    _apply: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values rounded to the format, in their own dtype."""
        return self._apply(values)

    def is_narrower_than(self, dtype: torch.dtype) -> bool:
        """Return whether values of a dtype lose digits by this rounding.

        TF32 and truncation are considered for float32 only.

        bfloat16 loses none in float16, except for a few very large or small values: that is no sign of a rounding.
        """
        if dtype != torch.float32 and (self.how == "truncated" or self.word == words.ROUNDED_TO_TF32):
            return False
        return self.mantissa < _MANTISSA.get(dtype, 0)


def _through(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that rounds values by converting them to a dtype and back."""
    return lambda values: values.to(dtype).to(values.dtype)


def _tf32_nearest(values: torch.Tensor) -> torch.Tensor:
    """Round values to TF32, to nearest even; NaN and infinity stay."""
    bits = values.to(torch.float32).view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF  # to even: 10 of 23 mantissa bits remain
    return torch.where(torch.isfinite(values), rounded.view(torch.float32), values.to(torch.float32)).to(values.dtype)


def _truncated(dropped: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that clears the lowest `dropped` bits of float32 values."""
    return lambda values: (values.view(torch.int32) & ~((1 << dropped) - 1)).view(torch.float32)


ROUNDINGS = (
    Rounding(words.ROUNDED_TO_BF16, "nearest", 7, _through(torch.bfloat16)),
    Rounding(words.ROUNDED_TO_FP16, "nearest", 10, _through(torch.float16)),
    Rounding(words.ROUNDED_TO_TF32, "nearest", 10, _tf32_nearest),
    Rounding(words.ROUNDED_TO_BF16, "truncated", 7, _truncated(16)),
    Rounding(words.ROUNDED_TO_TF32, "truncated", 10, _truncated(13)),
)
"""Ways to round, in the order in which they are tried: fewer mantissa bits first, since the wider formats keep those
values too."""
