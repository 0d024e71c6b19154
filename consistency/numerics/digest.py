r"""Digests that every backend computes bit for bit alike, per block, where the tensor lives.

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
kernel does it (`kernel.py`), or NumPy, whose integer arithmetic is vectorised; torch's is not.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics.kernels import compiled as kernel
from consistency.numerics.kernels import triton_digest

BLOCK_BYTES = 256 * 1024
"""Bytes per block, the unit in which a digest says where two tensors differ."""

ROW_BYTES = 8 * 1024
"""Bytes per row: the two weight tables of 8 KiB each and what streams past them fit in a level-1 cache of 32 KiB."""

_WORDS = ROW_BYTES // 8
_ROWS = BLOCK_BYTES // ROW_BYTES
_WEIGHT_SEED = 0x636F6E7369737465  # "consiste"; NumPy promises PCG64's stream across versions and platforms
_CHUNK_ROWS = 64  # 512 KiB: it and its shifted copy stay in a level-2 cache of 1 MiB, and a call's overhead is small
_GPU_CHUNK_ROWS = 8192  # 64 MiB of scratch on an accelerator: enough work per launch, little beside a model


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """The digest of one tensor.

    Attributes
    ----------
    value : str
        32 hexadecimal digits over dtype, shape and block digests.
    blocks : tuple of int
        Unsigned 64-bit digest of each block of `BLOCK_BYTES`, in order.
    """

    value: str
    blocks: tuple[int, ...]


def digest(tensor: torch.Tensor) -> TensorDigest:
    """Compute the digest of a tensor on the device where it lives.

    Parameters
    ----------
    tensor : torch.Tensor
        Any shape, strides and dtype of whole bytes. It is not changed and not copied as a whole, unless its elements
        do not lie one after the other in memory.

    Returns
    -------
    TensorDigest
    """
    blocks = block_digests(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return combine(dtype, tuple(tensor.shape), blocks)


def combine(dtype: str, shape: tuple[int, ...], blocks: tuple[int, ...]) -> TensorDigest:
    """Fold block digests, dtype and shape into one value."""
    head = f"{dtype}{list(shape)}".encode()
    body = np.array(blocks, dtype="<u8").tobytes()
    return TensorDigest(value=hashlib.blake2b(head + b"\0" + body, digest_size=16).hexdigest(), blocks=blocks)


def differing_blocks(actual: tuple[int, ...], expected: tuple[int, ...]) -> list[int]:
    """Return the indices of blocks that differ; a block that only one side has differs."""
    longer = max(len(actual), len(expected))
    a, e = list(actual), list(expected)
    return [i for i in range(longer) if i >= len(a) or i >= len(e) or a[i] != e[i]]


def block_digests(tensor: torch.Tensor) -> tuple[int, ...]:
    """Compute the digest of each block of a tensor, as unsigned 64-bit integers."""
    if tensor.numel() == 0:
        return ()
    raw = as_bytes(tensor)
    rows = _rows_on_cpu(raw.numpy()) if raw.device.type == "cpu" else _rows_on_device(raw)
    return tuple(_fold(rows).view(np.uint64).tolist())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements, in row-major order, as a flat uint8 tensor; copies only what is not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)  # flatten first: view() refuses some last dims of 1
    if flat.stride(0) != 1:  # a column of a matrix: flat already, but its elements do not lie one after the other
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _rows_on_cpu(raw: np.ndarray) -> np.ndarray:
    """Return the digest of each row of flat bytes as int64, the last row possibly short."""
    whole = len(raw) // ROW_BYTES
    found = np.empty(-(-len(raw) // ROW_BYTES), np.int64)
    compiled = kernel.trusted(kernel.DIGEST) if whole and raw.flags.c_contiguous else None
    if compiled is None:
        sum_rows_by_numpy(raw[: whole * ROW_BYTES], found)
    else:
        compiled.digest(raw.ctypes.data, whole, *weights_of_row(), found)
    if len(raw) > whole * ROW_BYTES:
        found[-1] = _short_row(raw[whole * ROW_BYTES :])
    return found


def sum_rows_by_numpy(raw: np.ndarray, out: np.ndarray) -> None:
    """Digest whole rows into the first elements of an int64 array."""
    rows = raw.view("<i8").reshape(-1, _WORDS)  # NumPy reads unaligned words too
    w, v = weights_of_row()
    scratch = _scratch()
    high = np.empty(_CHUNK_ROWS, np.int64)
    for start in range(0, len(rows), _CHUNK_ROWS):
        x = rows[start : start + _CHUNK_ROWS]
        shifted, low = scratch[: len(x)], out[start : start + len(x)]
        np.einsum("ri,i->r", x, w, out=low)
        np.right_shift(x, 32, out=shifted)
        low += np.einsum("ri,i->r", shifted, v, out=high[: len(x)])


def _short_row(raw: np.ndarray) -> np.int64:
    """Return the digest of the bytes that do not fill a row, padded with zeros to whole words."""
    words = np.frombuffer(raw.tobytes().ljust(-(-len(raw) // 8) * 8, b"\0"), "<i8")
    w, v = weights_of_row()
    with np.errstate(over="ignore"):
        found: np.int64 = np.dot(words, w[: len(words)]) + np.dot(words >> 32, v[: len(words)])
    return found


def _rows_on_device(raw: torch.Tensor) -> np.ndarray:
    """Do the same on another device with torch's own operations; what does not fill a row is done on the host."""
    whole = raw.numel() // ROW_BYTES * ROW_BYTES
    found = [_sum_rows(raw[:whole])] if whole else []
    if raw.numel() > whole:
        found.append(np.array([_short_row(raw[whole:].cpu().numpy())], np.int64))
    return np.concatenate(found)


def _sum_rows(raw: torch.Tensor) -> np.ndarray:
    """Return the digests of whole rows; on a GPU the fused kernel computes them where it may be trusted."""
    w, v = _weights_on(raw.device)
    misaligned = raw.data_ptr() % 8 or raw.storage_offset() % 8
    if raw.device.type == "cuda" and not misaligned:
        fused = triton_digest.sums(raw.view(torch.int64), w, v)
        if fused is not None:
            return fused.cpu().numpy()
    sums = []
    for part in raw.split(_GPU_CHUNK_ROWS * ROW_BYTES):
        words = part.clone() if misaligned else part
        x = words.view(torch.int64).view(-1, _WORDS)
        high = torch.bitwise_right_shift(x, 32)
        sums.append(torch.addcmul(high.mul_(v), x, w).sum(dim=1))
    return torch.cat(sums).cpu().numpy()


def _fold(rows: np.ndarray) -> np.ndarray:
    """Fold the digests of rows, `(n,)` int64, into those of blocks."""
    padded = np.zeros(-(-len(rows) // _ROWS) * _ROWS, np.int64)
    padded[: len(rows)] = rows
    x = padded.reshape(-1, _ROWS)
    w, v = _weights_of_block()
    folded: np.ndarray = np.einsum("ri,i->r", x, w) + np.einsum("ri,i->r", x >> 32, v)
    return folded


_kept = threading.local()


def _scratch() -> np.ndarray:
    """Return this thread's buffer, `(_CHUNK_ROWS, _WORDS)`: a new one would cost a page fault per page."""
    if not hasattr(_kept, "scratch"):
        _kept.scratch = np.empty((_CHUNK_ROWS, _WORDS), np.int64)
    found: np.ndarray = _kept.scratch
    return found


@functools.cache
def _weight_arrays() -> np.ndarray:
    """Return the fixed weights, `(2, _WORDS + _ROWS)` int64: `w` for even words, `v - 2**32 w` for the shifted word."""
    stream = np.random.Generator(np.random.PCG64(_WEIGHT_SEED))
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    # v - 2**32 w is as uniform as v, so it is drawn directly
    return stream.integers(low, high, size=(2, _WORDS + _ROWS), dtype=np.int64, endpoint=True)


@functools.cache
def weights_of_row() -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of a row's words, `(ROW_BYTES / 8,)` int64 each: `w`, and `v - 2**32 w`."""
    table = _weight_arrays()
    return table[0, :_WORDS].copy(), table[1, :_WORDS].copy()


@functools.cache
def _weights_of_block() -> tuple[np.ndarray, np.ndarray]:
    table = _weight_arrays()
    return table[0, _WORDS:].copy(), table[1, _WORDS:].copy()


@functools.cache
def _weights_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    w, v = weights_of_row()
    return torch.from_numpy(w).to(device), torch.from_numpy(v).to(device)
