"""The tolerance report: per layer and architecture, the worst difference and its tolerance."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from consistency.case import standard
from consistency.comparison.outcomes import Graded, Workers, group_by_key
from consistency.comparison.result import Comparison, Outcome, Status, TensorComparison, tensor_name
from consistency.numerics.real import Real
from consistency.numerics.rules import Rule

_EXACT = frozenset({Rule.BITWISE, Rule.PEER})


class LayerCell(Graded, msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor on the workers of one architecture.

    Attributes
    ----------
    status : str
        The worst status of a worker.
    max_abs, allowed, ratio : float or None
        The worst difference from the reference and its tolerance, both in the tensor's own unit, and the difference
        over the tolerance. Where each element has its own tolerance, the worst difference is the one with the largest
        ratio, which need not be the largest difference. For a bitwise rule `allowed` is 0, and there is no ratio. NaN
        is worse than any number; None where nothing was measured.
    max_ulp : int or None
        The largest difference in units in the last place of the dtype.
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
        """Whether every device that was compared is bitwise equal to its reference."""
        return all(cell.status in ("equal", "skipped") for cell in self.architectures.values())

    @property
    def badness(self) -> tuple[int, float]:
        return max(cell.badness for cell in self.architectures.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFilter:
    """A choice of a part of the tolerance report; an empty field excludes nothing."""

    stages: tuple[str, ...] = ()
    pattern: str = ""  # shell pattern of a layer, or of layer and tensor
    architecture: str = ""  # part of the name of an architecture, in upper or lower case

    def chosen(self, layers: Iterable[LayerComparison]) -> Iterator[LayerComparison]:
        """Yield the tensors that match, with the architectures that match."""
        for layer in layers:
            if not self._matches(layer):
                continue
            part_of_name = self.architecture.casefold()
            cells = {name: cell for name, cell in layer.architectures.items() if part_of_name in name.casefold()}
            if not cells:
                continue
            if len(cells) == len(layer.architectures):
                yield layer
            else:
                yield msgspec.structs.replace(layer, architectures=cells)

    def _matches(self, layer: LayerComparison) -> bool:
        """Return whether stage and name of a tensor match."""
        from fnmatch import fnmatchcase

        if self.stages and layer.stage not in self.stages:
            return False
        names = (layer.layer, f"{layer.layer}.{layer.tensor}")
        return not self.pattern or any(fnmatchcase(name, self.pattern) for name in names)


def layers_of(comparison: Comparison) -> Iterator[LayerComparison]:
    """Yield every tensor of the model and every operator by architecture, in the order of the comparison.

    Copies between devices and facts about a process have no tolerance of a layer, and are left out.
    """
    members = ByArchitecture(comparison)
    # most tensors are equal everywhere, and the cells of one are those of the others: they are made once
    equal: dict[tuple[object, ...], dict[str, LayerCell]] = {}
    for tensor in comparison.tensors:
        if tensor.stage == standard.TRANSFER or tensor.rule == Rule.LIMIT or not tensor.outcomes:
            continue
        # where all bits agree, the cells depend on the workers and their classes alone
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
    """Return the worst tensor by architecture and stage; the first, where several are as bad."""
    worst: dict[tuple[str, str], LayerComparison] = {}
    for layer in layers:
        for name, cell in layer.architectures.items():
            key = (name, layer.stage)
            if key not in worst or cell.badness > worst[key].architectures[name].badness:
                worst[key] = layer
    return worst


def block_of(layer: str) -> str:
    """Return the repeated block that a layer is in, by the first number in its name, or the layer itself.

    `model.layers.3.self_attn.q_proj` is in `model.layers.3`.
    """
    parts = layer.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The tensors of one block in one stage, in the model's order."""

    name: str
    stage: str
    load_path: str
    members: tuple[LayerComparison, ...]

    @property
    def worst(self) -> LayerComparison:
        return max(self.members, key=lambda layer: layer.badness)

    def worst_by_architecture(self) -> Mapping[str, LayerComparison]:
        """Return the worst tensor of each architecture: `worst` where no other is worse there."""
        # `worst` comes first, so that it is preferred to others that are as bad
        worst = worst_by_architecture((self.worst, *self.members))
        return {name: layer for (name, _), layer in worst.items()}


def blocks_of(layers: Iterable[LayerComparison]) -> list[Block]:
    """Fold layers by stage, load path and block, each in the place of its first layer."""
    layers_by_block = group_by_key(((layer.stage, layer.load_path, block_of(layer.layer)), layer) for layer in layers)
    return [
        Block(stage=stage, load_path=load_path, name=name, members=tuple(members))
        for (stage, load_path, name), members in layers_by_block.items()
    ]


class ByArchitecture:
    """The architectures of the workers of a comparison, and sets of workers by architecture."""

    def __init__(self, comparison: Comparison) -> None:
        self.architectures = tuple(dict.fromkeys([*(group.name for group in comparison.architectures), ""]))
        self.of: dict[str, str] = {}  # architecture by worker
        for group in comparison.architectures:
            self.of.update(dict.fromkeys(group.workers, group.name))
        names = dict.fromkeys(worker.name for worker in comparison.workers)
        self._ranks = {name: rank for rank, name in enumerate(names)}
        # many tensors have the same sets of workers
        self.split, self.join = functools.cache(self._split), functools.cache(self._join)

    def _split(self, workers: Workers) -> dict[str, Workers]:
        """Return the workers of each architecture; workers without one are under an empty name."""
        by_architecture = group_by_key((self.of.get(worker, ""), worker) for worker in workers)
        return {architecture: tuple(members) for architecture, members in by_architecture.items()}

    def _join(self, sets: tuple[Workers, ...]) -> Workers:
        """Return the workers of several sets, in the order of the comparison."""
        if len(sets) == 1:
            return sets[0]
        workers = itertools.chain.from_iterable(sets)
        return tuple(sorted(workers, key=lambda worker: self._ranks.get(worker, len(self._ranks))))


def cells_of(tensor: TensorComparison, members: ByArchitecture) -> dict[str, LayerCell]:
    """Return the cell of each architecture for a tensor; workers without one are under an empty name."""
    rows: dict[str, list[tuple[Outcome, Workers]]] = {}
    for row in tensor.outcomes:
        for architecture, workers in members.split(row.workers).items():
            rows.setdefault(architecture, []).append((row, workers))
    classes: dict[str, list[Workers]] = {}
    for equal_workers in tensor.classes:
        for architecture, workers in members.split(equal_workers).items():
            classes.setdefault(architecture, []).append(workers)
    return {
        architecture: _cell(tensor, rows[architecture], classes.get(architecture, ()), members)
        for architecture in members.architectures
        if architecture in rows
    }


def _cell(
    tensor: TensorComparison,
    rows_with_workers: Sequence[tuple[Outcome, Workers]],
    classes: Sequence[Workers],
    members: ByArchitecture,
) -> LayerCell:
    """Return the cell of one architecture.

    Parameters
    ----------
    rows_with_workers : sequence of tuple
        Rows of the tensor, each with its workers of the architecture.
    classes : sequence of tuple of str
        Workers of the architecture whose bits agree.
    """
    rows = [row for row, _ in rows_with_workers]
    worst = max(rows, key=lambda row: row.badness)
    difference, allowed = _worst_bits(rows) if tensor.rule in _EXACT else difference_of(tensor.rule, worst)
    return LayerCell(
        workers=members.join(tuple(workers for _, workers in rows_with_workers)),
        status=worst.status,
        max_abs=difference,
        allowed=allowed,
        ratio=worst.ratio,
        max_ulp=max((row.max_ulp for row in rows if row.max_ulp is not None), default=None),
        classes=tuple(classes),
    )


def difference_of(rule: str, row: Outcome) -> tuple[Real | None, Real | None]:
    """Return the difference of the worst element of a row with a tolerance, and the tolerance of that element."""
    if row.allowed is None or row.ratio is None:
        return row.max_abs, None
    if rule == Rule.RELATIVE or not row.allowed:  # one tolerance for all elements; nothing is allowed
        return row.max_abs, row.allowed
    return Real(row.ratio * row.allowed), row.allowed


def _worst_bits(rows: Sequence[Outcome]) -> tuple[Real | None, Real | None]:
    """Return the largest difference of rows in which every bit should be equal, and their tolerance: 0."""
    differences = [row.max_abs for row in rows if row.max_abs is not None]
    return max(differences, key=_or_infinity, default=None), Real(0.0)


def _or_infinity(value: Real) -> float:
    """Return a value to order by: NaN is as large as infinity."""
    return math.inf if math.isnan(value) else float(value)
