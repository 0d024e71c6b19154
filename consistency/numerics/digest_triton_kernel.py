r"""The block digest's sums in one kernel, written in Triton: the tensor is read once and nothing is written beside it.

Triton comes with CUDA builds of torch alone, so this module is imported by `digest_triton` when it is first needed, and
by nothing else. The formula is that of `digest`, :math:`w X + V (X \gg 32)` in wrapping 64-bit integers.

What limits it is the memory: compiled for sm_90, 512 words of 8 bytes cost a warp some 200 instructions, 102 of them
32-bit multiply-adds (the GPU has no 64-bit multiplier). At two cycles per multiply-add, four warps at a time, 132
multiprocessors and 1.7 GHz that is enough for 15 TB/s, three times what an H200's memory delivers. So the products are
not taken apart by hand. The two weight tables would be twice the tensor's traffic if every word fetched its own: a
program keeps its part of them in registers and goes through several blocks with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WARPS = 1  # a warp sums by shuffles alone: no shared memory and no barrier
_PART_WORDS = 512
"""A program's share of a block: 16 words a thread, which with their weights take 128 registers on sm_90 and 154 on
sm_80. So 16 programs fit on a multiprocessor of an H100, with 64 KiB of loads in flight; 4.8 TB/s at 0.8 µs need 29."""


# what differs from launch to launch must not make another binary than the one that was checked
@triton.jit(do_not_specialize=["blocks", "last_words", "rows"])  # type: ignore[untyped-decorator]
def _sum_parts(  # type: ignore[no-untyped-def]  # Triton gives annotations a meaning of its own
    words,
    w,
    v,
    out,
    blocks,
    last_words,
    rows,
    BLOCK_WORDS: tl.constexpr,  # noqa: N803 - Triton's way to write a constant
    PART_WORDS: tl.constexpr,  # noqa: N803
):
    """Sum one part of up to `rows` successive blocks, and store each sum at its place in `out`, `(blocks, parts)`."""
    parts: tl.constexpr = BLOCK_WORDS // PART_WORDS
    part = tl.program_id(0) % parts
    block = tl.program_id(0) // parts * rows
    stop = tl.minimum(block + rows, blocks)
    column = part * PART_WORDS + tl.arange(0, PART_WORDS)
    weight = tl.load(w + column)
    weight_of_high = tl.load(v + column)
    while block < stop:  # not range(): Triton's interpreter before 3.9 cannot take its bounds under NumPy 2.4
        start = words + block.to(tl.int64) * BLOCK_WORDS + column
        if block < blocks - 1:  # noqa: SIM108 - two branches, of which one is rare
            x = tl.load(start)  # without a mask, so that a thread may load two words at a time
        else:
            x = tl.load(start, mask=column < last_words, other=0)
        total = tl.sum(x * weight + (x >> 32) * weight_of_high, axis=0)
        tl.store(out + block.to(tl.int64) * parts + part, total)
        block += 1


def launch(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, rows: int) -> torch.Tensor:
    """Return the wrapped sum of each block of a flat int64 tensor, on the current device and stream.

    Parameters
    ----------
    words : torch.Tensor
        int64, `(n,)`, contiguous, n > 0; the last block may be short.
    w, v : torch.Tensor
        The weights, int64, `(words of a block,)`.
    rows : int
        How many blocks one program goes through: more means less weight traffic and fewer programs.
    """
    block_words = w.numel()
    blocks = triton.cdiv(words.numel(), block_words)
    parts = block_words // _PART_WORDS
    out = torch.empty((blocks, parts), dtype=torch.int64, device=words.device)
    grid = (triton.cdiv(blocks, rows) * parts,)
    last_words = words.numel() - (blocks - 1) * block_words
    _sum_parts[grid](
        words, w, v, out, blocks, last_words, rows,
        BLOCK_WORDS=block_words, PART_WORDS=_PART_WORDS, num_warps=_WARPS,
    )  # fmt: skip
    return out.sum(dim=1)
