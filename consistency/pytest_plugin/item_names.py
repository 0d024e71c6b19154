"""The test items of a case, from JSON files and safetensors headers alone: no torch, no tensor data.

Tensors that only the loaded model has (buffers, activations of unusual models, weights that transformers fuses) have no
items of their own; one item per stage and device stands for all of them, so that none goes unreported.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consistency.capture.names import (
    ADAPTER_MERGED,
    ADAPTER_OFF,
    ADAPTER_ON,
    DELTA,
    LOADED_AGAIN,
    RANK_AND_SCALING,
    SAFE_WEIGHT,
    SETTINGS_LAYER,
    WEIGHT,
    adapter_place,
    is_method_tensor,
    split_name,
)  # fmt: skip
from consistency.case.adapter_fit import read_adapter
from consistency.case.case import Case
from consistency.case.checkpoint import read_checkpoint, read_json
from consistency.case.quantized import states_settings
from consistency.case.stages import SPECS, Stage
from consistency.comparison.result import Comparison, Row, TensorComparison
from consistency.launch.plan import WorkerPlan

EVERYTHING_ELSE = "everything_else"
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WITH_LOGITS = re.compile(r"For(CausalLM|MaskedLM)$|LMHeadModel$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of one stage, which has an item for each worker; `everything_else` is the rest of the stage.

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
        for tensor in comparison.tensors:
            layer, part = _place_in_file(tensor)
            place = Place(stage=Stage(tensor.stage), layer=layer, tensor=part)
            if place not in self._tensors:
                place = Place(stage=place.stage, layer="", tensor=EVERYTHING_ELSE)
            self._tensors.setdefault(place, []).append(tensor)

    def rows(self, place: Place, plan: WorkerPlan) -> Iterator[tuple[TensorComparison, Row]]:
        """Yield the tensors of a place, each with its row of a worker."""
        for tensor in self._tensors[place]:
            row = tensor.row(plan.name) if tensor.load_path == plan.load_path else None
            if row is not None:
                yield tensor, row


def _place_in_file(tensor: TensorComparison) -> tuple[str, str]:
    for row, _ in tensor.groups:
        if tensor.stage == Stage.BASE and row.name_in_file:
            return split_name(row.name_in_file)
    return tensor.layer, tensor.tensor


def base_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `base`; this and the next three are named by `StageSpec.items`."""
    if case.factory is None:
        weights = read_checkpoint(
            Path(case.base), stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle
        )
        yield from (split_name(name) for name in weights.tensors if not states_settings(name))


def adapter_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `adapter`."""
    yield from (adapter_place(key) for key in _adapter_keys(case))
    yield SETTINGS_LAYER, RANK_AND_SCALING
    if case.reloads:
        yield SETTINGS_LAYER, LOADED_AGAIN


def merged_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `merged`."""
    layers = dict.fromkeys(adapter_place(key)[0] for key in _adapter_keys(case) if is_method_tensor(key))
    tensors = (DELTA, WEIGHT, SAFE_WEIGHT) if case.plan.safe_merge else (DELTA, WEIGHT)
    yield from ((layer, tensor) for layer in layers for tensor in tensors)


def _adapter_keys(case: Case) -> Mapping[str, Any]:
    if case.adapter is None:
        return {}
    return read_adapter(Path(case.adapter), allow_pickle=case.allow_pickle)[1]


def forward_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `forward`."""
    if case.factory is not None:
        return
    config = read_json(Path(case.base) / "config.json")
    layers = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), None)
    if layers is None or config.get("is_encoder_decoder"):
        return
    activations = [f"hidden_states.{i}" for i in range(layers + 1)]
    if any(_WITH_LOGITS.search(str(name)) for name in config.get("architectures") or ()):
        activations.append("logits")
    modes = (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED) if case.adapter else (ADAPTER_OFF,)
    yield from ((activation, mode) for activation in activations for mode in modes)
