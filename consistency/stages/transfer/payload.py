"""Payloads of the stage `transfer`: bytes made with NumPy, their layout on either side, and the expected delivery.

Every copy has different bytes: if two copies sent the same, stale bytes from an earlier one in a reused buffer would
look right.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from consistency.worker.model.poison import POISON, poisoned

Layout = Callable[[torch.Tensor], torch.Tensor]


def _whole(buffer: torch.Tensor) -> torch.Tensor:
    return buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One copy and its expected delivery."""

    name: str
    """Name of the copy in reports."""
    sent: torch.Tensor
    """The source buffer, on the host."""
    expected: torch.Tensor
    """The whole destination buffer after the copy, on the host: `POISON` wherever nothing may arrive."""
    take: Layout = _whole
    """Returns the copied part of the source buffer."""
    put: Layout = _whole
    """Returns the place of that part in the destination buffer."""

    @property
    def bytes(self) -> int:
        """Return the number of bytes that arrive."""
        arrives = self.put(self.expected)
        return arrives.numel() * arrives.element_size()

    @property
    def poison(self) -> int:
        return POISON[self.expected.element_size()]

    def landing(self, device: torch.device) -> torch.Tensor:
        """Return the buffer at the destination, filled with `POISON` by the device itself."""
        return poisoned(tuple(self.expected.shape), self.expected.dtype, device)


def contiguous(name: str, size: int) -> Payload:
    """Return a payload of `size` bytes that are copied as they lie; none of them is the poison's."""
    sent = _random(name, size)
    sent[sent == POISON[1]] ^= 0xFF
    tensor = torch.from_numpy(sent)
    return Payload(name=name, sent=tensor, expected=tensor)


def strided(name: str, size: int) -> Payload:
    """Return a payload of about `size` bytes from every other row of a transposed matrix into half of a wider one."""
    rows = math.isqrt(size // 4)
    columns = rows + 1  # not square, so that a copy without the transposition does not fit
    sent = _random(name, 8 * rows * columns).view(np.int32).reshape(2 * rows, columns)
    expected = np.full((columns, 2 * rows), POISON[4], np.int32)
    expected[:, :rows] = sent.T[:, ::2]
    return Payload(
        name=name,
        sent=torch.from_numpy(sent),
        expected=torch.from_numpy(expected),
        take=lambda buffer: buffer.t()[:, ::2],
        put=lambda buffer: buffer[:, : buffer.shape[1] // 2],
    )


def casting(name: str, size: int, source: torch.dtype, destination: torch.dtype) -> Payload:
    """Return a payload of about `size` bytes that is cast on the way; the same cast on the host is the reference.

    Magnitudes are from 2⁻⁸ to 2⁸, normal numbers in every dtype: how a backend treats subnormals and NaN is a
    different question from whether the copy works.
    """
    raw = _random(name, size // 4 * 4).view(np.uint32)
    # sign and mantissa are random; of the exponent four bits are, above the one of 2⁻⁸
    sign_and_mantissa = raw & np.uint32(0x807FFFFF)
    exponent = 119 + ((raw >> 23) & 0xF)
    numbers = (sign_and_mantissa | (exponent << 23)).astype(np.uint32).view(np.float32)
    sent = torch.from_numpy(numbers).to(source)
    return Payload(name=name, sent=sent, expected=sent.to(destination))


def _random(name: str, size: int) -> np.ndarray:
    """Return `size` bytes derived from a name; NumPy guarantees PCG64's raw stream across versions and platforms."""
    generator = np.random.PCG64(zlib.crc32(name.encode()))
    words: np.ndarray = generator.random_raw(math.ceil(size / 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:size]
