"""Recognize bytes that belong elsewhere: another tensor's, or stale ones under a copy that never arrived."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from consistency.numerics.digest import as_bytes, digest
from consistency.numerics.same_bytes import same_memory

_GRANULARITY = 512
"""Torch's caching allocators hand out memory in multiples of so many bytes, so stale bytes begin at one."""

_LEAST_BYTES = 64  # fewer bytes may agree by chance

_WIDEST = 8  # bytes of the widest number: every narrower one repeats at such a distance too


def file_of_another(by_digest: Mapping[str, str], own: str, tensor: torch.Tensor) -> str | None:
    """Return the key of another tensor of the adapter's file whose bytes these are; `own` is the right one's digest."""
    value = digest(tensor).value
    return by_digest.get(value) if value != own else None


def stale_bytes(tensors: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> str | None:
    """Return where else in the model the bytes of a tensor are, as `name` or `bytes 512 to 2560 of name`.

    `tensors` is what the model held before, on any device; they are read to the CPU one at a time.
    """
    raw = as_bytes(tensor.detach().to("cpu")).numpy()
    if len(raw) < _LEAST_BYTES or same_memory(raw[_WIDEST:], raw[:-_WIDEST]):  # too few, or one value everywhere
        return None
    for name, other in tensors.items():
        if other.layout is not torch.strided or other.nbytes < len(raw):
            continue
        held = as_bytes(other.detach().to("cpu")).numpy()
        for start in _candidates(raw, held):
            if same_memory(held[start : start + len(raw)], raw):
                return name if len(raw) == len(held) else f"bytes {start} to {start + len(raw)} of {name}"
    return None


def _candidates(raw: np.ndarray, held: np.ndarray) -> list[int]:
    """Return the offsets in `held`, multiples of the allocator's granularity, at which `raw` could begin."""
    starts = np.arange(0, len(held) - len(raw) + 1, _GRANULARITY)
    fits = np.ones(len(starts), bool)
    for byte in range(8):
        fits &= held[starts + byte] == raw[byte]
    return [int(start) for start in starts[fits]]
