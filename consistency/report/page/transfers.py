"""The transfer matrix: from which device to which a copy arrives as it was sent, and how fast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from consistency.comparison.result import BAD, Row, TensorComparison
from consistency.report.page.labels import KEY
from consistency.report.text import one_line

STAGE = "transfer"
ARROW = "->"

_RANK = {status: place for place, status in enumerate(("equal", "within", "skipped", "blocked"))}
_MARKS = {status: mark for status, mark, _ in KEY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One kind of copy on one way."""

    kind: str
    status: str
    mark: str
    gb_per_s: str
    diagnosis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """All kinds of copy from one device to another; the worst status stands for them."""

    status: str
    mark: str
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """From each device to each; `chains` lead over more than two."""

    load_path: str
    names: tuple[str, ...]
    ways: dict[tuple[str, str], Way]
    chains: tuple[tuple[str, Way], ...]


def matrices(tensors: Iterable[TensorComparison]) -> list[Matrix]:
    """Return one matrix per road with rows of the stage `transfer`."""
    load_paths: dict[str, dict[str, list[Copy]]] = {}
    for tensor in tensors:
        if tensor.stage == STAGE:
            copies = load_paths.setdefault(tensor.load_path, {}).setdefault(tensor.layer, [])
            copies += (_copy(tensor.tensor, row) for row in tensor.rows)
    return [_matrix(load_path, layers) for load_path, layers in load_paths.items()]


def _matrix(load_path: str, layers: dict[str, list[Copy]]) -> Matrix:
    names: dict[str, None] = {}
    ways, chains = {}, []
    for layer, copies in layers.items():
        stops = [one_line(stop) for stop in layer.split(ARROW)]
        worst = max(copies, key=lambda copy: _RANK.get(copy.status, len(_RANK)))
        way = Way(status=worst.status, mark=worst.mark, copies=tuple(copies))
        if len(stops) == 2:
            names.update(dict.fromkeys(stops))
            ways[stops[0], stops[1]] = way
        else:
            chains.append((" → ".join(stops), way))
    return Matrix(load_path=one_line(load_path), names=tuple(names), ways=ways, chains=tuple(chains))


def _copy(kind: str, row: Row) -> Copy:
    speed = row.evidence.get("gb_per_s")
    known = isinstance(speed, (int, float)) and not isinstance(speed, bool)
    word = row.diagnosis or row.status if row.status in BAD else row.reason or ""
    return Copy(
        kind=one_line(kind),
        status=row.status,
        mark=_MARKS[row.status],
        gb_per_s=f"{speed:.3g} GB/s" if known else "",
        diagnosis=one_line(word),
    )
