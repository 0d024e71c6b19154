r"""Digests per block, computed where the tensor lives and bitwise equal on every backend.

A tensor's bytes, in row-major order and padded with zeros, are read as little-endian 32-bit words
:math:`x_0, x_1, …`. A row of `ROW_BYTES` has the digest

.. math:: h = \sum_i w_i \, x_{2i} + v_i \, x_{2i+1} \pmod{2^{64}}

with fixed random 64-bit weights; even words count as unsigned, odd words as signed. This is multilinear hashing, which
is strongly universal in its upper 32 bits when words have 32 bits and weights 64 (Lemire and Kaser, "Strongly universal
string hashing is fast", 2014, theorem 1). Taking whole 64-bit words instead would be faster and wrong: the top bit of a
word then adds :math:`2^{63}` under any odd weight, so that two flipped sign bits cancel. The digests of the rows of a
block of `BLOCK_BYTES` are words again, and the same hash with other weights makes the block's digest of them. Two
levels, because the weights of one row stay in a level-1 cache: twice the speed of one level.

Integer sums wrap and do not depend on the order of reduction, so a CPU, a GPU and any other backend agree. Position
matters. With :math:`x_{2i} + 2^{32} x_{2i+1}` the signed 64-bit word :math:`X_i`, the sum is computed as
:math:`\sum_i w_i X_i + (v_i - 2^{32} w_i)\,(X_i \gg 32)`: two dot products and one shift. On the CPU the compiled
kernel computes it, or NumPy, whose integer arithmetic is vectorised; torch's is not.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics.dtype import name_of
from consistency.numerics.kernels import device_digest, numpy_digest, triton_digest, trust
from consistency.numerics.kernels.compiled import DIGEST
from consistency.numerics.kernels.numpy_digest import ROW_BYTES, sum_short_row, weights_of_row
from consistency.numerics.sizes import GPU_CHUNK_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """The digest of one tensor."""

    value: str
    """32 hexadecimal digits over dtype, shape and block digests."""
    blocks: tuple[int, ...]
    """Unsigned 64-bit digest of each block of `BLOCK_BYTES`, in order."""


def digest(tensor: torch.Tensor) -> TensorDigest:
    """Compute the digest of a tensor on the device where it lives.

    Parameters
    ----------
    tensor : torch.Tensor
        Any shape, strides and dtype of whole bytes. It is not changed, and copied only if its elements are not
        contiguous in memory.
    """
    return combine(name_of(tensor.dtype), tuple(tensor.shape), block_digests(tensor))


def combine(dtype: str, shape: tuple[int, ...], blocks: tuple[int, ...]) -> TensorDigest:
    """Fold block digests, dtype and shape into one value."""
    # little-endian on every machine, so that digests of two machines can be compared
    head = f"{dtype}{list(shape)}".encode()
    body = np.array(blocks, dtype="<u8").tobytes()
    return TensorDigest(value=hashlib.blake2b(head + b"\0" + body, digest_size=16).hexdigest(), blocks=blocks)


def differing_blocks(actual: tuple[int, ...], expected: tuple[int, ...]) -> list[int]:
    """Return the indices of blocks that differ; a block that only one side has differs."""
    return [i for i, (a, e) in enumerate(itertools.zip_longest(actual, expected)) if a != e]


def block_digests(tensor: torch.Tensor) -> tuple[int, ...]:
    """Compute the digest of each block of a tensor, as unsigned 64-bit integers."""
    if tensor.numel() == 0:
        return ()
    raw = as_bytes(tensor)
    rows = _rows_on_cpu(raw.numpy()) if raw.device.type == "cpu" else _rows_on_device(raw)
    return tuple(numpy_digest.fold(rows).view(np.uint64).tolist())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements, in row-major order, as a flat uint8 tensor; only if not contiguous they are copied."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)  # flatten first: view() refuses some last dims of 1
    if flat.stride(0) != 1:  # a column of a matrix is flat, but not contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _rows_on_cpu(raw: np.ndarray) -> np.ndarray:
    """Return the digest of each row of flat bytes as int64, the last row possibly short."""
    whole_rows = len(raw) // ROW_BYTES
    digests = np.empty(-(-len(raw) // ROW_BYTES), np.int64)
    kernel = trust.trusted(DIGEST) if whole_rows and raw.flags.c_contiguous else None
    if kernel is None:
        numpy_digest.sum_rows(raw[: whole_rows * ROW_BYTES], digests)
    else:
        kernel.digest(raw.ctypes.data, whole_rows, *weights_of_row(), digests, threads=torch.get_num_threads())
    if len(digests) > whole_rows:
        digests[whole_rows:] = sum_short_row(raw[whole_rows * ROW_BYTES :])
    return digests


def _rows_on_device(raw: torch.Tensor) -> np.ndarray:
    """Return the digest of each row of flat bytes on another device as int64, on the CPU.

    Torch's own operations compute them on the device; a short last row is digested on the host, and all rows where the
    device gets test words wrong (`kernels/device_digest.py`).
    """
    # a lazy backend computes now all that it has noted, or else again with each tensor that depends on it
    settle = getattr(getattr(torch, raw.device.type, None), "settle", None)
    if settle is not None:
        settle(raw.device)
    if raw.numel() >= ROW_BYTES and not device_digest.is_proven(*_weights_on(raw.device)):
        return np.concatenate([_rows_on_cpu(part.cpu().numpy()) for part in raw.split(GPU_CHUNK_ROWS * ROW_BYTES)])
    whole_bytes = raw.numel() // ROW_BYTES * ROW_BYTES
    digests = [_sum_rows(raw[:whole_bytes])] if whole_bytes else []
    if raw.numel() > whole_bytes:
        digests.append(sum_short_row(raw[whole_bytes:].cpu().numpy()))
    return np.concatenate(digests)


def _sum_rows(raw: torch.Tensor) -> np.ndarray:
    """Return the digests of whole rows; on a GPU the fused kernel computes them where it may be trusted."""
    w, v = _weights_on(raw.device)
    is_misaligned = raw.data_ptr() % 8 or raw.storage_offset() % 8
    if raw.device.type == "cuda" and not is_misaligned:
        fused = triton_digest.sums(raw.view(torch.int64), w, v)
        if fused is not None:
            return fused.cpu().numpy()
    sums = []
    for part in raw.split(GPU_CHUNK_ROWS * ROW_BYTES):
        words = part.clone() if is_misaligned else part  # torch views bytes as int64 only from a multiple of 8
        sums.append(device_digest.sums(words.view(torch.int64), w, v))
    return torch.cat(sums).cpu().numpy()


@functools.cache
def _weights_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of a row's words on a device: see `weights_of_row`."""
    w, v = weights_of_row()
    return torch.from_numpy(w).to(device), torch.from_numpy(v).to(device)
