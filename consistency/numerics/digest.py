r"""Digests that every backend computes bit for bit alike, per block, where the tensor lives.

A tensor's bytes, in row-major order and padded with zeros, are read as little-endian 32-bit words
:math:`x_0, x_1, …`. A block of `BLOCK_BYTES` has the digest

.. math:: h = \sum_i w_i \, x_{2i} + v_i \, x_{2i+1} \pmod{2^{64}}

with fixed random 64-bit weights; even words count as unsigned, odd words as signed. This is multilinear hashing, which
is strongly universal in its upper 32 bits when words have 32 bits and weights 64 (Lemire and Kaser, "Strongly universal
string hashing is fast", 2014, theorem 1). Taking whole 64-bit words instead would be faster and wrong: the top bit of a
word then adds :math:`2^{63}` under any odd weight, so that two flipped sign bits cancel.

Integer sums wrap and do not depend on the order of reduction, so a CPU, a GPU and any other backend agree. Position
matters. With :math:`x_{2i} + 2^{32} x_{2i+1}` the signed 64-bit word :math:`X_i`, the sum is computed as
:math:`\sum_i w_i X_i + (v_i - 2^{32} w_i)\,(X_i \gg 32)`: two dot products and one shift.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics import digest_triton

BLOCK_BYTES = 256 * 1024
"""Bytes per block: the two weight tables (256 KiB each) and a chunk stay in a level-2 cache of 1 MiB."""

_WORDS = BLOCK_BYTES // 8
_WEIGHT_SEED = 0x636F6E7369737465  # "consiste"; NumPy promises PCG64's stream across versions and platforms
_GPU_CHUNK_BLOCKS = 256  # 64 MiB of scratch on an accelerator: enough work per launch, little beside a model


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
    whole = raw.numel() // 8 * 8
    sums: list[torch.Tensor] = []
    if whole:
        words = raw[:whole]
        if words.data_ptr() % 8 or words.storage_offset() % 8:
            sums.extend(_sum_misaligned(words))
        else:
            sums.extend(_sum_words(words.view(torch.int64)))
    tail = raw[whole:]
    blocks = np.concatenate([s.cpu().numpy() for s in sums]) if sums else np.empty(0, np.int64)
    if tail.numel():
        blocks = _add_tail(blocks, tail, first_word=whole // 8)
    return tuple(blocks.view(np.uint64).tolist())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements, in row-major order, as a flat uint8 tensor; copies only what is not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)  # flatten first: view() refuses some last dims of 1
    if flat.stride(0) != 1:  # a column of a matrix: flat already, but its elements do not lie one after the other
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _sum_words(words: torch.Tensor) -> list[torch.Tensor]:
    """Return the wrapped sums of each block of a flat int64 tensor, the last block possibly short."""
    full = words.numel() // _WORDS
    w, v = _weights(words.device)
    if words.device.type == "cuda" and (fused := digest_triton.sums(words, w, v)) is not None:
        return [fused]
    add = _dot_blocks if words.device.type == "cpu" else _multiply_and_sum
    sums = []
    step = 2 if words.device.type == "cpu" else _GPU_CHUNK_BLOCKS
    for start in range(0, full, step):
        stop = min(full, start + step)
        sums.append(add(words[start * _WORDS : stop * _WORDS].view(stop - start, _WORDS), w, v))
    rest = words[full * _WORDS :]
    if rest.numel():
        sums.append(add(rest.view(1, -1), w[: rest.numel()], v[: rest.numel()]))
    return sums


def _dot_blocks(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # torch's integer matrix-vector product reads its operand once and allocates nothing of its size
    return torch.mv(words, w) + torch.mv(torch.bitwise_right_shift(words, 32), v)


def _multiply_and_sum(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    high = torch.bitwise_right_shift(words, 32)
    return torch.addcmul(high.mul_(v), words, w).sum(dim=1)


def _sum_misaligned(raw: torch.Tensor) -> list[torch.Tensor]:
    """Sum words that do not start on a multiple of eight bytes, by way of an aligned copy of a few blocks at a time."""
    sums = []
    step = BLOCK_BYTES * (2 if raw.device.type == "cpu" else _GPU_CHUNK_BLOCKS)
    for start in range(0, raw.numel(), step):
        sums.extend(_sum_words(raw[start : start + step].clone().view(torch.int64)))
    return sums


def _add_tail(blocks: np.ndarray, tail: torch.Tensor, *, first_word: int) -> np.ndarray:
    """Add the last one to seven bytes, padded with zeros to a word."""
    padded = tail.cpu().numpy().tobytes().ljust(8, b"\0")
    word = np.frombuffer(padded, dtype="<i8").astype(np.int64)
    w, v = _weight_arrays()
    place = first_word % _WORDS
    with np.errstate(over="ignore"):
        part = word * w[place] + (word >> 32) * v[place]
        if place == 0:
            return np.concatenate([blocks, part])
        blocks = blocks.copy()
        blocks[-1] += part[0]
    return blocks


@functools.cache
def _weight_arrays() -> tuple[np.ndarray, np.ndarray]:
    """Return the fixed weights: `w` for even words, and `v - 2**32 w` for the shifted word, each `(_WORDS,)` int64."""
    stream = np.random.Generator(np.random.PCG64(_WEIGHT_SEED))
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    table = stream.integers(low, high, size=(2, _WORDS), dtype=np.int64, endpoint=True)
    return table[0], table[1]  # v - 2**32 w is as uniform as v, so it is drawn directly


@functools.cache
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    w, v = _weight_arrays()
    return torch.from_numpy(w).to(device), torch.from_numpy(v).to(device)
