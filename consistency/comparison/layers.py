"""The tolerance report: per layer and architecture, the worst difference and what was allowed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from consistency.case import standard
from consistency.comparison.outcomes import Graded, Workers, gathered
from consistency.comparison.result import Comparison, Outcome, Status, TensorComparison, tensor_name
from consistency.numerics.real import Real
from consistency.numerics.rules import Rule

_EXACT = frozenset({Rule.BITWISE, Rule.PEER})


class LayerCell(Graded, msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor on the workers of one architecture.

    Attributes
    ----------
    status : str
        The worst.
    max_abs, allowed, ratio : float or None
        The worst difference from the reference, what is allowed of it, both in the tensor's own unit, and the one over
        the other. Where each element has its own tolerance, the worst difference is the one of the largest ratio, which
        need not be the largest one. Of a bitwise rule `allowed` is 0, and there is no ratio. NaN is worse than any
        number; None where nothing was measured.
    max_ulp : int or None
        In units in the last place of the dtype.
    classes : tuple of tuple of str
        Workers of this architecture whose bits agree.
    """

    workers: tuple[str, ...]
    status: Status
    max_abs: Real | None
    allowed: Real | None
    ratio: Real | None
    max_ulp: int | None
    classes: tuple[tuple[str, ...], ...]


class LayerComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor on one load path, by architecture."""

    stage: str
    load_path: str
    layer: str
    tensor: str
    architectures: dict[str, LayerCell]

    @property
    def name(self) -> str:
        """Return `stage::layer.tensor`."""
        return tensor_name(self.stage, self.layer, self.tensor)

    @property
    def is_equal(self) -> bool:
        """Whether every device that was compared is bitwise equal to what it should be."""
        return all(cell.status in ("equal", "skipped") for cell in self.architectures.values())

    @property
    def badness(self) -> tuple[int, float]:
        return max(cell.badness for cell in self.architectures.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFilter:
    """Which part of the tolerance report is asked for; what is empty excludes nothing."""

    stages: tuple[str, ...] = ()
    pattern: str = ""  # shell pattern of a layer, or of layer and tensor
    architecture: str = ""  # part of the name of an architecture, in upper or lower case

    def chosen(self, layers: Iterable[LayerComparison]) -> Iterator[LayerComparison]:
        """Yield what matches, with the architectures that match."""
        from fnmatch import fnmatchcase

        wanted = self.architecture.casefold()
        for one in layers:
            if self.stages and one.stage not in self.stages:
                continue
            names = (one.layer, f"{one.layer}.{one.tensor}")
            if self.pattern and not any(fnmatchcase(name, self.pattern) for name in names):
                continue
            cells = {name: cell for name, cell in one.architectures.items() if wanted in name.casefold()}
            if cells:
                yield one if len(cells) == len(one.architectures) else msgspec.structs.replace(one, architectures=cells)


def layers_of(comparison: Comparison) -> Iterator[LayerComparison]:
    """Yield every tensor of the model and every operator by architecture, in the order of the comparison.

    Copies between devices and facts about a process have no tolerance of a layer, and are left out.
    """
    members = ByArchitecture(comparison)
    equal: dict[tuple[object, ...], dict[str, LayerCell]] = {}  # what is equal everywhere is so in most layers
    for tensor in comparison.tensors:
        if tensor.stage == standard.TRANSFER or tensor.rule == Rule.LIMIT or not tensor.outcomes:
            continue
        cells = None
        key = (tensor.classes, len(tensor.workers))
        is_equal = tensor.rule in _EXACT and tensor.is_equal
        if is_equal:
            cells = equal.get(key)
        if cells is None:
            cells = cells_of(tensor, members)
        if is_equal:
            equal[key] = cells
        yield LayerComparison(
            stage=tensor.stage,
            load_path=tensor.load_path,
            layer=tensor.layer,
            tensor=tensor.tensor,
            architectures=cells,
        )


def worst_by_architecture(layers: Iterable[LayerComparison]) -> dict[tuple[str, str], LayerComparison]:
    """Return the worst tensor by architecture and stage: of several that are as bad, the first."""
    found: dict[tuple[str, str], LayerComparison] = {}
    for one in layers:
        for name, cell in one.architectures.items():
            known = found.get((name, one.stage))
            if known is None or cell.badness > known.architectures[name].badness:
                found[name, one.stage] = one
    return found


def block_of(layer: str) -> str:
    """Return the repeated block that a layer is in, by the first number in its name, or the layer itself.

    `model.layers.3.self_attn.q_proj` is in `model.layers.3`.
    """
    parts = layer.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return layer if place is None else ".".join(parts[: place + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The tensors of one block in one stage, in the model's order."""

    name: str
    stage: str
    load_path: str
    members: tuple[LayerComparison, ...]

    @property
    def worst(self) -> LayerComparison:
        return max(self.members, key=lambda one: one.badness)

    def worst_by_architecture(self) -> Mapping[str, LayerComparison]:
        """Return the worst tensor of each architecture: `worst` where no other is worse there."""
        return {name: one for (name, _), one in worst_by_architecture((self.worst, *self.members)).items()}


def blocks_of(layers: Iterable[LayerComparison]) -> list[Block]:
    """Fold layers by stage, load path and block, each in the place of its first layer."""
    found = gathered(((one.stage, one.load_path, block_of(one.layer)), one) for one in layers)
    return [
        Block(stage=stage, load_path=load_path, name=name, members=tuple(members))
        for (stage, load_path, name), members in found.items()
    ]


class ByArchitecture:
    """The architectures of the workers of a comparison, and sets of workers by architecture."""

    def __init__(self, comparison: Comparison) -> None:
        self.architectures = tuple(dict.fromkeys([*(group.name for group in comparison.architectures), ""]))
        self.of = {name: group.name for group in comparison.architectures for name in group.workers}
        self._places = {name: place for place, name in enumerate(dict.fromkeys(w.name for w in comparison.workers))}
        self.split, self.join = functools.cache(self._split), functools.cache(self._join)

    def _split(self, workers: Workers) -> dict[str, Workers]:
        """Return the workers of each architecture; those of none are under an empty name."""
        found = gathered((self.of.get(name, ""), name) for name in workers)
        return {name: tuple(some) for name, some in found.items()}

    def _join(self, sets: tuple[Workers, ...]) -> Workers:
        """Return the workers of several sets, in the order of the comparison."""
        if len(sets) == 1:
            return sets[0]
        every = (worker for some in sets for worker in some)
        return tuple(sorted(every, key=lambda worker: self._places.get(worker, len(self._places))))


def cells_of(tensor: TensorComparison, members: ByArchitecture) -> dict[str, LayerCell]:
    """Return what each architecture saw of a tensor; workers of none are under an empty name."""
    rows = gathered((name, (row, some)) for row in tensor.outcomes for name, some in members.split(row.workers).items())
    classes = gathered((name, some) for alike in tensor.classes for name, some in members.split(alike).items())
    order = (name for name in members.architectures if name in rows)
    return {name: _cell(tensor, rows[name], classes.get(name, ()), members) for name in order}


def _cell(
    tensor: TensorComparison, found: Sequence[tuple[Outcome, Workers]], classes: Sequence[Workers], by: ByArchitecture
) -> LayerCell:
    rows = [row for row, _ in found]
    worst = max(rows, key=lambda row: row.badness)
    difference, allowed = _worst_bits(rows) if tensor.rule in _EXACT else difference_of(tensor.rule, worst)
    return LayerCell(
        workers=by.join(tuple(workers for _, workers in found)),
        status=worst.status,
        max_abs=difference,
        allowed=allowed,
        ratio=worst.ratio,
        max_ulp=max((row.max_ulp for row in rows if row.max_ulp is not None), default=None),
        classes=tuple(classes),
    )


def difference_of(rule: str, row: Outcome) -> tuple[Real | None, Real | None]:
    """Return the difference of the worst element of a row with a tolerance, and what is allowed of it."""
    if row.allowed is None or row.ratio is None:
        return row.max_abs, None
    if rule == Rule.RELATIVE or not row.allowed:  # one tolerance for all elements; nothing is allowed
        return row.max_abs, row.allowed
    return Real(row.ratio * row.allowed), row.allowed


def _worst_bits(rows: Sequence[Outcome]) -> tuple[Real | None, Real | None]:
    found = [row.max_abs for row in rows if row.max_abs is not None]
    return max(found, key=lambda value: math.inf if math.isnan(value) else float(value), default=None), Real(0.0)
