"""One finding for each fault: what follows from another finding of the same check stands under it.

A card that computes wrongly is found by the CPU, and by each rank that computes a micro-batch of it or for it; a weight
that differs makes other ranks compute other bits too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from consistency.comparison import kinds
from consistency.extras.watching.kinds import (
    BASE_CHANGED,
    NOT_FINITE_FROM,
    OTHER_RANK_DIFFERS,
    RANKS_DIFFER,
    WRONG_BLOCK,
    WRONG_SUM,
)
from consistency.extras.watching.outcome import Discovery

_CAUSES: dict[str, tuple[str, ...]] = {
    OTHER_RANK_DIFFERS: (BASE_CHANGED, RANKS_DIFFER, WRONG_BLOCK, kinds.NOT_REPEATABLE, OTHER_RANK_DIFFERS),
    kinds.NOT_REPEATABLE: (WRONG_BLOCK,),
    RANKS_DIFFER: (BASE_CHANGED, WRONG_SUM, RANKS_DIFFER),
}
"""The kinds of findings from which one of a kind may follow, where they have a rank in common."""

_OF_ALL_RANKS = (NOT_FINITE_FROM, WRONG_BLOCK)
"""Kinds that are one fault where several ranks have them in the same place: the code's or the batch's."""


def one_for_each_fault(discoveries: Sequence[Discovery]) -> list[Discovery]:
    """Return the discoveries of one check that follow from no other, each with those that do under it."""
    causes: list[Discovery] = []
    for discovery in sorted(discoveries, key=_follows_from_how_many):
        number = next((n for n, cause in enumerate(causes) if _is_one_fault(discovery, cause)), None)
        if number is None:
            causes.append(discovery)
        else:
            causes[number] = _with(causes[number], discovery)
    return causes


def _with(cause: Discovery, discovery: Discovery) -> Discovery:
    """Return a discovery with another one under it."""
    detail = (*cause.detail, f"with it: {discovery.message}")
    ranks = cause.ranks
    if discovery.kind == cause.kind and cause.kind in _OF_ALL_RANKS:
        ranks = tuple(sorted({*cause.ranks, *discovery.ranks}))
    elif discovery.kind == cause.kind and cause.kind == OTHER_RANK_DIFFERS:
        # of two pairs, the rank that both have in common
        ranks = tuple(rank for rank in cause.ranks if rank in discovery.ranks)
    return replace(cause, detail=detail, ranks=ranks)


def _follows_from_how_many(discovery: Discovery) -> int:
    """Return an order in which a cause comes before what may follow from it."""
    return len(_CAUSES.get(discovery.kind, ()))


def _is_one_fault(discovery: Discovery, cause: Discovery) -> bool:
    """Report whether a discovery may follow from another: of that kind, and about one of its ranks."""
    if discovery.kind == cause.kind and cause.kind in _OF_ALL_RANKS:
        return discovery.tensors[:1] == cause.tensors[:1]
    if cause.kind not in _CAUSES.get(discovery.kind, ()):
        return False
    return not cause.ranks or not discovery.ranks or bool(set(cause.ranks) & set(discovery.ranks))
