r"""The digest of rows in one Triton kernel: the tensor is read once and only the sums are written.

Triton comes only with CUDA builds of torch, so only `triton_digest` imports this module, when it is first needed. The
formula is that of `digest`, :math:`w X + V (X \gg 32)` in wrapping 64-bit integers.

What limits it is the memory: compiled for sm_90, 512 words of 8 bytes cost a warp some 200 instructions, 102 of them
32-bit multiply-adds (the GPU has no 64-bit multiplier). At two cycles per multiply-add, four warps at a time, 132
multiprocessors and 1.7 GHz that is enough for 15 TB/s, three times what an H200's memory delivers. So the products are
not taken apart by hand. The two weight tables would be twice the tensor's traffic if every word fetched its own: a
program keeps its part of them in registers and goes through several rows with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WARPS = 1  # a warp sums by shuffles alone: no shared memory and no barrier
_PART_WORDS = 512
"""A program's share of a row: 16 words a thread, which with their weights take 96 registers; all 16 are loaded before
the first is used."""

_MOST_REGISTERS = 136
"""So 15 programs of 32 threads share the 65536 registers of a multiprocessor, with 60 KiB of loads in flight; an H200's
4.8 TB/s need 29 at 0.8 µs. Without a limit ptxas takes up to 156 on sm_70 to sm_89, and 12 programs fit. With it the
same loads are in flight and nothing spills; at 128, Triton 3.4 spills there."""


# what differs from launch to launch must not make another binary than the one that was checked
@triton.jit(do_not_specialize=["rows", "last_words", "turns"])  # type: ignore[untyped-decorator]
def _sum_parts(  # type: ignore[no-untyped-def]  # Triton gives annotations another meaning
    words,
    w,
    v,
    out,
    rows,
    last_words,
    turns,
    ROW_WORDS: tl.constexpr,  # noqa: N803 - Triton's way to write a constant
    PART_WORDS: tl.constexpr,  # noqa: N803
):
    """Sum one part of up to `turns` successive rows, and store each sum at its place in `out`, `(rows, parts)`."""
    parts: tl.constexpr = ROW_WORDS // PART_WORDS
    part = tl.program_id(0) % parts
    row = tl.program_id(0) // parts * turns
    stop = tl.minimum(row + turns, rows)
    column = part * PART_WORDS + tl.arange(0, PART_WORDS)
    weight = tl.load(w + column)
    weight_of_high = tl.load(v + column)
    while row < stop:  # not range(): Triton's interpreter before 3.9 cannot take its bounds under NumPy 2.4
        start = words + row.to(tl.int64) * ROW_WORDS + column
        if row < rows - 1:  # noqa: SIM108 - two branches, of which one is rare
            x = tl.load(start)  # without a mask, so that a thread may load two words at a time
        else:
            x = tl.load(start, mask=column < last_words, other=0)
        total = tl.sum(x * weight + (x >> 32) * weight_of_high, axis=0)
        tl.store(out + row.to(tl.int64) * parts + part, total)
        row += 1


def launch(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, turns: int) -> torch.Tensor:
    """Return the wrapped sum of each row of a flat int64 tensor that is not empty, on the current device and stream.

    `triton_digest.sums` describes the tensors. `turns` is how many rows one program goes through: more means less
    weight traffic and fewer programs.
    """
    row_words = w.numel()
    rows = triton.cdiv(words.numel(), row_words)
    parts = row_words // _PART_WORDS
    out = torch.empty((rows, parts), dtype=torch.int64, device=words.device)
    grid = (triton.cdiv(rows, turns) * parts,)
    last_words = words.numel() - (rows - 1) * row_words
    limit: dict[str, int] = {}
    if torch.version.hip is None:
        limit["maxnreg"] = _MOST_REGISTERS  # PTX's name; AMD's compiler takes fewer by itself
    else:
        # Triton makes another binary for AMD where a torch.Tensor's storage is below 2 GiB: the check has only such a
        # one. Anything else that has an address gets the binary for any size.
        words = triton.reinterpret(words, tl.int64)
    _sum_parts[grid](
        words,
        w,
        v,
        out,
        rows,
        last_words,
        turns,
        ROW_WORDS=row_words,
        PART_WORDS=_PART_WORDS,
        num_warps=_WARPS,
        **limit,
    )
    return out.sum(dim=1)
