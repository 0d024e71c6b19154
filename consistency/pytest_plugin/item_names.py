"""The test items of a case, from JSON files and safetensors headers alone: no torch, no tensor data.

An adapter has items for what its file holds, and for what it should hold. Tensors that only the loaded model has
(buffers, activations of unusual models, weights that transformers fuses) have no items of their own. Each belongs to
the first item of its layer, and where its layer has none, to one item per stage and device that stands for all others:
none goes unreported, and whoever selects a layer selects all of its tensors.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from consistency.capture.names import (
    split_name,
)
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.launch.plan import WorkerPlan

EVERYTHING_ELSE = "everything_else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of one stage, which has an item for each worker; `everything_else` is the rest of the stage.

    The first place of a layer has its tensors without a place of their own too.

    The names are those of the file for `base`, and those of the model otherwise.
    """

    stage: Stage
    layer: str
    tensor: str

    @property
    def name(self) -> str:
        return self.tensor if self.is_rest else f"{self.layer}.{self.tensor}"

    @property
    def is_rest(self) -> bool:
        return self.tensor == EVERYTHING_ELSE


def places(case: Case) -> tuple[Place, ...]:
    """Return every place of a case, in the order of its stages."""
    found: list[Place] = []
    for stage in case.stages:
        spec = SPECS[stage]
        if case.adapter is None and spec.needs_adapter:
            continue
        named = pkgutil.resolve_name(spec.items)(case) if spec.items else ()
        found += (Place(stage=stage, layer=layer, tensor=tensor) for layer, tensor in named)
        found.append(Place(stage=stage, layer="", tensor=EVERYTHING_ELSE))
    return tuple(dict.fromkeys(found))


class RowFinder:
    """Find the rows of a comparison by the places of its case."""

    def __init__(self, comparison: Comparison, known: Sequence[Place]) -> None:
        self._tensors: dict[Place, list[TensorComparison]] = {place: [] for place in known}
        of_layer = {(place.stage, place.layer): place for place in reversed(known)}
        for tensor in comparison.tensors:
            place = own_place(tensor)
            if place not in self._tensors:
                rest = Place(stage=place.stage, layer="", tensor=EVERYTHING_ELSE)
                place = of_layer.get((place.stage, place.layer), rest)
            self._tensors.setdefault(place, []).append(tensor)

    def rows(self, place: Place, plan: WorkerPlan) -> Iterator[tuple[TensorComparison, Outcome]]:
        """Yield the tensors of a place, each with its row of a worker."""
        for tensor in self._tensors[place]:
            row = tensor.outcome(plan.name) if tensor.load_path == plan.load_path else None
            if row is not None:
                yield tensor, row


def own_place(tensor: TensorComparison) -> Place:
    """Return the place of a tensor's own, whether it is one of the case or not."""
    layer, part = tensor.layer, tensor.tensor
    for row in tensor.outcomes:
        if tensor.stage == standard.BASE and row.name_in_file:
            layer, part = split_name(row.name_in_file)
            break
    return Place(stage=Stage(tensor.stage), layer=layer, tensor=part)
