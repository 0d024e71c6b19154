"""Classes of agreement as groups: which workers hold the same bits, and in how many tensors they part so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consistency.capture.wording import shortened
from consistency.comparison.result import TensorComparison
from consistency.report.page.labels import letter
from consistency.report.text import one_line

MOST_PARTITIONS = 6
"""Ways to part, per stage: the commonest tell; a fleet without agreement may have one per tensor."""

_MOST_CLASSES = _MOST_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """Workers with the same bits."""

    letter: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A way in which the workers of a road part into classes, and the tensors of a stage in which they do.

    Attributes
    ----------
    more : int
        Classes beyond those that are drawn.
    """

    stage: str
    load_path: str
    tensors: int
    of: int
    first: str
    classes: tuple[Class, ...]
    more: int


def partitions(tensors: Sequence[TensorComparison]) -> tuple[list[Partition], int]:
    """Return the commonest ways to part, stage by stage, and how many are left out."""
    found: dict[tuple[str, str], dict[tuple[tuple[str, ...], ...], list[TensorComparison]]] = {}
    for tensor in tensors:
        if tensor.classes:
            by_classes = found.setdefault((tensor.load_path, tensor.stage), {})
            by_classes.setdefault(tensor.classes, []).append(tensor)
    drawn, left_out = [], 0
    for (load_path, stage), ways in found.items():
        of = sum(map(len, ways.values()))
        ranked = sorted(ways.items(), key=lambda way: -len(way[1]))
        left_out += len(ranked[MOST_PARTITIONS:])
        for classes, alike in ranked[:MOST_PARTITIONS]:
            drawn.append(
                Partition(
                    stage=one_line(stage),
                    load_path=one_line(load_path),
                    tensors=len(alike),
                    of=of,
                    first=one_line(f"{alike[0].layer}.{alike[0].tensor}"),
                    classes=tuple(
                        Class(letter=letter(number), names=tuple(map(one_line, shortened(names, _MOST_NAMES))))
                        for number, names in enumerate(classes[:_MOST_CLASSES])
                    ),
                    more=len(classes[_MOST_CLASSES:]),
                )
            )
    return drawn, left_out
