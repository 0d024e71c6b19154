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

from consistency.capture.names import split_name
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.launch.plan import WorkerPlan

EVERYTHING_ELSE = "everything_else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of one stage, which has an item for each worker.

    The first place of a layer is also for the layer's tensors without a place of their own. The tensor
    `everything_else` stands for all tensors of the stage whose layers have no place.

    The names are those of the file for `base`, and those of the model otherwise.
    """

    stage: Stage
    layer: str
    tensor: str

    @property
    def name(self) -> str:
        """Return the name in a node id."""
        return self.tensor if self.is_everything_else else f"{self.layer}.{self.tensor}"

    @property
    def is_everything_else(self) -> bool:
        """Return whether this place is for all tensors of the stage that no other place is for."""
        return self.tensor == EVERYTHING_ELSE


def places(case: Case) -> tuple[Place, ...]:
    """Return every place of a case, in the order of its stages."""
    all_places: dict[Place, None] = {}  # each once, in order
    for stage in case.stages:
        spec = SPECS[stage]
        if case.adapter is None and spec.needs_adapter:
            continue
        names = pkgutil.resolve_name(spec.items)(case) if spec.items else ()
        all_places |= {Place(stage=stage, layer=layer, tensor=tensor): None for layer, tensor in names}
        all_places[_everything_else(stage)] = None
    return tuple(all_places)


def _everything_else(stage: Stage) -> Place:
    return Place(stage=stage, layer="", tensor=EVERYTHING_ELSE)


class RowFinder:
    """Find the rows of a comparison by the places of its case."""

    def __init__(self, comparison: Comparison, case_places: Sequence[Place]) -> None:
        self._tensors: dict[Place, list[TensorComparison]] = {place: [] for place in case_places}
        # Reversed, so that the first place of a layer is the one that stays.
        first_of_layer = {(place.stage, place.layer): place for place in reversed(case_places)}
        for tensor in comparison.tensors:
            place = place_of_tensor(tensor)
            if place not in self._tensors:
                place = first_of_layer.get((place.stage, place.layer), _everything_else(place.stage))
            self._tensors.setdefault(place, []).append(tensor)

    def rows(self, place: Place, plan: WorkerPlan) -> Iterator[tuple[TensorComparison, Outcome]]:
        """Yield the tensors of a place, each with its row of a worker."""
        for tensor in self._tensors[place]:
            if tensor.load_path != plan.load_path:
                continue
            if (row := tensor.outcome(plan.name)) is not None:
                yield tensor, row


def place_of_tensor(tensor: TensorComparison) -> Place:
    """Return the place that is for this tensor alone, whether the case has such a place or not."""
    layer, name = tensor.layer, tensor.tensor
    for row in tensor.outcomes:
        if tensor.stage == standard.BASE and row.name_in_file:
            layer, name = split_name(row.name_in_file)
            break
    return Place(stage=Stage(tensor.stage), layer=layer, tensor=name)
