"""What the stage `transfer` sends: bytes made with NumPy, how they lie on either side, and what has to arrive.

Every copy has bytes of its own. Where two copies sent the same, one that delivers what an earlier one brought, from a
buffer that was used again, would look right.
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
    """One copy and what it has to deliver.

    Attributes
    ----------
    name : str
        What a report calls it.
    sent : torch.Tensor
        The buffer that it comes from, on the host.
    take, put : callable
        The part of that buffer, and the part of the one at the destination, that the copy is between.
    expected : torch.Tensor
        The whole buffer at the destination when the copy has come, on the host: `POISON` wherever nothing may arrive.
    """

    name: str
    sent: torch.Tensor
    expected: torch.Tensor
    take: Layout = _whole
    put: Layout = _whole

    @property
    def bytes(self) -> int:
        """Return how many bytes arrive."""
        arrives = self.put(self.expected)
        return arrives.numel() * arrives.element_size()

    @property
    def poison(self) -> int:
        return POISON[self.expected.element_size()]

    def landing(self, device: torch.device) -> torch.Tensor:
        """Return the buffer at the destination, filled with `POISON` by the device itself."""
        return poisoned(tuple(self.expected.shape), self.expected.dtype, device)


def contiguous(name: str, size: int) -> Payload:
    """Return a copy of so many bytes as they lie; none of them is the poison's."""
    sent = _random(name, size)
    sent[sent == POISON[1]] ^= 0xFF
    tensor = torch.from_numpy(sent)
    return Payload(name=name, sent=tensor, expected=tensor)


def strided(name: str, size: int) -> Payload:
    """Return a copy of about so many bytes from every other row of a matrix, turned, into the half of a wider one."""
    rows = math.isqrt(size // 4)
    columns = rows + 1  # not square: a turned copy that was not turned would fit
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
    """Return a copy of about so many bytes that casts on its way; the same cast done on the host tells what is right.

    Magnitudes are from 2⁻⁸ to 2⁸, which every dtype holds as normal numbers: what a backend makes of subnormals and
    NaN is another question than whether the copy works.
    """
    raw = _random(name, size // 4 * 4).view(np.uint32)
    exponent = 119 + ((raw >> 23) & 0xF)
    numbers = ((raw & np.uint32(0x807FFFFF)) | (exponent << 23)).astype(np.uint32).view(np.float32)
    sent = torch.from_numpy(numbers).to(source)
    return Payload(name=name, sent=sent, expected=sent.to(destination))


def _random(name: str, size: int) -> np.ndarray:
    """Return bytes that the name decides; NumPy promises PCG64's raw stream across versions and platforms."""
    words: np.ndarray = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-size // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:size]
