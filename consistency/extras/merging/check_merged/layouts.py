"""Orders of rows that a merge may take by mistake for the model's: parts exchanged, rotary pairs, head by head.

An order is a tensor of indices: row i of the weight got the row `order[i]` of the delta.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.names import FUSED, fused_in
from consistency.extras.merging.check_merged.question import Heads

NamedOrder = tuple[MergeCause, str, torch.Tensor]

_HEAD_SIZES = (8, 16, 32, 64, 80, 96, 128, 256)
"""Rows of a head where no config states them."""

_PARTS = ("q", "k", "v")


def named_orders(name: str, size: int, heads: Heads | None) -> Iterator[NamedOrder]:
    """Yield the orders that `size` rows of a weight may have, with the cause and in words."""
    if size % 2 == 0:
        yield from _of_halves(size)
    yield from _of_parts(name, size, heads)
    yield from _of_rotary_pairs(size, heads)
    yield from _by_head(size, heads)


def parts_of(name: str, size: int, heads: Heads | None) -> dict[str, tuple[int, int]]:
    """Return the first row of each part of a fused weight, and the one after its last; empty where it has none."""
    fused = FUSED.get(fused_in(name), ())
    if heads is not None and len(fused) != 2 and size == (heads.queries + 2 * heads.keys) * heads.size:
        sizes = [heads.queries * heads.size, *[heads.keys * heads.size] * 2]
    elif fused and size % len(fused) == 0:
        sizes = [size // len(fused)] * len(fused)
    else:
        return {}
    edges = [0, *itertools.accumulate(sizes)]
    return dict(zip(fused or _PARTS, itertools.pairwise(edges), strict=True))


def _of_halves(size: int) -> Iterator[NamedOrder]:
    """Yield the orders of the two halves of a fused weight."""
    half, indices = size // 2, torch.arange(size)
    yield MergeCause.OTHER_PART, "its halves are swapped", indices.roll(half)
    row_by_row = "it is laid out row by row (g0, u0, g1, u1, ...), and the delta half after half"
    yield MergeCause.OTHER_PART, row_by_row, indices.view(2, half).T.reshape(-1)
    back = "it is laid out half after half, and the delta row by row"
    yield MergeCause.OTHER_PART, back, indices.view(half, 2).T.reshape(-1)


def _of_parts(name: str, size: int, heads: Heads | None) -> Iterator[NamedOrder]:
    """Yield the orders of three parts of a fused weight, which may be of unequal size."""
    parts = parts_of(name, size, heads)
    if len(parts) < 3:
        return
    names = list(parts)
    for permuted in itertools.permutations(names):
        if list(permuted) == names:
            continue
        moved = [part for part, other in zip(names, permuted, strict=True) if part != other]
        text = f"the delta has the parts in the order {', '.join(permuted)}"
        if len(moved) == 2:
            text = f"{moved[0]} and {moved[1]} are exchanged"
        yield MergeCause.OTHER_PART, text, torch.cat([torch.arange(*parts[part]) for part in permuted])


def _of_rotary_pairs(size: int, heads: Heads | None) -> Iterator[NamedOrder]:
    """Yield the two layouts of the pairs that rotary positions turn: halves of a head, or neighbours."""
    for head in [heads.size] if heads is not None else _HEAD_SIZES:
        if head % 2 or size % head or head >= size:
            continue
        indices = torch.arange(size)
        pairs = indices.view(-1, 2, head // 2).transpose(1, 2).reshape(-1)
        where = f"in each head of {head}"
        text = "the delta has rotary pairs {} " + where + ", and the weight {}"
        neighbours, halves = "as neighbours (Meta's layout)", "as halves (Hugging Face's)"
        yield MergeCause.ROW_ORDER, text.format(neighbours, halves), pairs
        yield MergeCause.ROW_ORDER, text.format(halves, neighbours), indices.view(-1, head // 2, 2).mT.reshape(-1)


def _by_head(size: int, heads: Heads | None) -> Iterator[NamedOrder]:
    """Yield the two layouts of queries, keys and values in one weight: head by head, or part after part."""
    by_head, by_part = "head by head", "q, then k, then v"
    text = "the delta is laid out {}, and the weight {}"
    for groups, each, head in _groups(size, heads):
        queries = groups * each * head
        indices = torch.arange(size)
        keys, values = indices[queries:].chunk(2)
        parts = [part.view(groups, -1) for part in (indices[:queries], keys, values)]
        to_heads = torch.cat(parts, dim=1).reshape(-1)
        where = f"; {groups} groups of {each + 2} heads of {head}"
        yield MergeCause.ROW_ORDER, text.format(by_head, by_part) + where, to_heads
        yield MergeCause.ROW_ORDER, text.format(by_part, by_head) + where, to_heads.argsort()


def _groups(size: int, heads: Heads | None) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of groups, of heads of queries in each, and of rows of a head, that make up a weight."""
    if heads is not None:
        if size == (heads.queries + 2 * heads.keys) * heads.size and heads.keys > 1:
            yield heads.keys, heads.queries // heads.keys, heads.size
        return
    for head in _HEAD_SIZES:
        if size % (3 * head) == 0 and size > 3 * head:
            yield size // (3 * head), 1, head
