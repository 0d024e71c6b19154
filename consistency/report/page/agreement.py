"""Partitions: which workers agree bitwise, and in how many tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consistency.comparison.result import TensorComparison

MOST_PARTITIONS = 6
"""Partitions per stage; a fleet without agreement may have one per tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Classes of workers that agree bitwise, and the tensors of a stage in which they do, of so many."""

    stage: str
    load_path: str
    tensors: int
    of: int
    first: str
    classes: tuple[tuple[str, ...], ...]


def partitions(tensors: Sequence[TensorComparison]) -> tuple[list[Partition], int]:
    """Return the most common partitions, stage by stage, and how many are left out."""
    found: dict[tuple[str, str], dict[tuple[tuple[str, ...], ...], list[TensorComparison]]] = {}
    for tensor in tensors:
        if tensor.classes:
            by_classes = found.setdefault((tensor.load_path, tensor.stage), {})
            by_classes.setdefault(tensor.classes, []).append(tensor)
    drawn: list[Partition] = []
    left_out = 0
    for (load_path, stage), ways in found.items():
        of = sum(map(len, ways.values()))
        ranked = sorted(ways.items(), key=lambda way: -len(way[1]))
        left_out += len(ranked[MOST_PARTITIONS:])
        drawn += [
            Partition(
                stage=stage, load_path=load_path, tensors=len(same), of=of, first=f"{same[0].layer}.{same[0].tensor}",
                classes=classes,
            )
            for classes, same in ranked[:MOST_PARTITIONS]
        ]  # fmt: skip
    return drawn, left_out
