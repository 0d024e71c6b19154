"""The test items of a case, from JSON files and safetensors headers alone: no torch, no tensor data.

An adapter has items for what its file holds, and for what it should hold. Tensors that only the loaded model has
(buffers, activations of unusual models, weights that transformers fuses) have no items of their own. Each belongs to
the first item of its layer, and where its layer has none, to one item per stage and device that stands for all others:
none goes unreported, and whoever selects a layer selects all of its tensors.
"""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consistency.capture.names import (
    ADAPTER_MERGED,
    ADAPTER_OFF,
    ADAPTER_ON,
    DELTA,
    END_TO_END,
    LOADED_AGAIN,
    RANK_AND_SCALING,
    SAFE_WEIGHT,
    SETTINGS_LAYER,
    WEIGHT,
    adapter_place,
    is_method_tensor,
    split_name,
)  # fmt: skip
from consistency.case import standard
from consistency.case.adapter_fit import read_adapter
from consistency.case.case import Case
from consistency.case.checkpoint import TensorHeader, read_checkpoint, read_json
from consistency.case.quantized import states_settings, weights_of
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.comparison.outcomes import gathered
from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.launch.plan import WorkerPlan

EVERYTHING_ELSE = "everything_else"
_BLOCK = re.compile(r"(?P<block>.*?\.\d+)(?:\.(?P<part>[^.]+))?")
WAYS, SEQUENCES = ("alone", "cache", "static_cache", "padded"), 4
"""Those of `generation` at level standard; a test holds them against the stage's own."""

_WITH_LOGITS = re.compile(r"For(CausalLM|MaskedLM)$|LMHeadModel$")


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


def base_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `base`; this and the next four are named by `StageSpec.items`."""
    yield from (split_name(name) for name in _base_tensors(case) if not states_settings(name))


def _base_tensors(case: Case) -> Mapping[str, TensorHeader]:
    """Return the headers of the base's file; none of a factory's model."""
    if case.factory is not None:
        return {}
    return read_checkpoint(
        Path(case.base), stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle
    ).tensors


def adapter_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `adapter`."""
    yield from (adapter_place(key) for key in _adapter(case)[1])
    yield from _expected(case)
    yield SETTINGS_LAYER, RANK_AND_SCALING
    if case.reloads:
        yield SETTINGS_LAYER, LOADED_AGAIN


def merged_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `merged`."""
    held = (adapter_place(key)[0] for key in _adapter(case)[1] if is_method_tensor(key))
    layers = dict.fromkeys([*held, *(layer for layer, _ in _expected(case))])
    tensors = (DELTA, WEIGHT, SAFE_WEIGHT) if case.plan.safe_merge else (DELTA, WEIGHT)
    yield from ((layer, tensor) for layer in layers for tensor in tensors)


def _expected(case: Case) -> list[tuple[str, str]]:
    """Return layer and tensor of what the adapter should hold."""
    config, tensors = _adapter(case)
    return expected_places(config, tensors, weights_of(_base_tensors(case)))


def _adapter(case: Case) -> tuple[Mapping[str, Any], Mapping[str, TensorHeader]]:
    """Return the adapter's config and the headers of its tensors."""
    return ({}, {}) if case.adapter is None else read_adapter(Path(case.adapter), allow_pickle=case.allow_pickle)


def forward_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `forward`: blocks and what they hold, by the names of the base's weights."""
    if case.factory is not None:
        return
    config = read_json(Path(case.base) / "config.json")
    modules = {name.rpartition(".")[0]: None for name in weights_of(_base_tensors(case))}
    held = (adapter_place(key)[0] for key in _adapter(case)[1] if is_method_tensor(key))
    layers: dict[str, None] = {}
    for module in in_model(modules, held):
        if match := _BLOCK.match(module):
            layers |= dict.fromkeys([match["block"], match[0]])
    modes = (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED) if case.adapter else (ADAPTER_OFF,)
    yield from ((layer, mode) for layer in layers for mode in modes)
    if any(_WITH_LOGITS.search(str(name)) for name in config.get("architectures") or ()):
        yield from (("logits", f"{mode}{ending}") for mode in modes for ending in ("", f".{END_TO_END}"))


def generation_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and way of the stage `generation`, and its texts; the encoder of a decoder has no way of its own."""
    layers = dict.fromkeys(layer for layer, _ in forward_items(case))
    own = [layer for layer in layers if "encoder" not in layer.split(".")]
    yield from ((layer, way) for layer in own for way in WAYS)
    yield from ((f"prompt {number}", "text") for number in range(SEQUENCES if own else 0))


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_OTHER_SIDE = {"A": "B", "B": "A"}
_NARROWED_BY = ("exclude_modules", "layers_to_transform", "layer_replication")
"""Fields by which a config adapts fewer or other layers than its `target_modules` name: PEFT alone says which."""


def expected_places(config: Mapping[str, Any], keys: Iterable[str], weights: Iterable[str]) -> list[tuple[str, str]]:
    """Return layer and tensor of what an adapter should hold of its method, in the order of the base.

    Parameters
    ----------
    config : mapping
        `adapter_config.json`.
    keys : iterable of str
        Of the adapter's file. A layer should hold what most layers of its kind do, whose names are equal but for the
        numbers in them.
    weights : iterable of str
        Names of the base's weights in its file.
    """
    parts: dict[str, dict[str, None]] = {}
    for layer, tensor in (adapter_place(key) for key in keys if is_method_tensor(key)):
        parts.setdefault(layer, {})[tensor] = None
    targets = config.get("target_modules")
    if not parts or not isinstance(targets, list) or any(config.get(field) for field in _NARROWED_BY):
        return []
    kinds = gathered((_NUMBER.sub("*", layer), tensors) for layer, tensors in parts.items())
    of_kind = {kind: _usual(layers) for kind, layers in kinds.items()}
    of_any = _usual(one for layers in kinds.values() for one in layers)
    modules = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    return [
        (layer, tensor)
        for layer in in_model(modules, parts)
        if any(layer == name or layer.endswith(f".{name}") for name in targets)
        for tensor in _both_sides(of_kind.get(_NUMBER.sub("*", layer), of_any))
    ]


def _usual(layers: Iterable[Iterable[str]]) -> list[str]:
    """Return the tensors that half of the layers have, or more."""
    sets = list(layers)
    counts = Counter(tensor for tensors in sets for tensor in tensors)
    return [tensor for tensor, count in counts.items() if 2 * count >= len(sets)]


def _both_sides(tensors: Sequence[str]) -> Iterable[str]:
    """Return tensors with the other factor of each: `lora_B` beside `lora_A`."""
    other = [f"{name[:-1]}{_OTHER_SIDE[name[-1]]}" for name in tensors if name.endswith(("_A", "_B"))]
    return dict.fromkeys([*tensors, *other])


def in_model(modules: Iterable[str], layers: Iterable[str]) -> Iterator[str]:
    """Yield the names of the base's modules in the model, whose files may have them under other leading components.

    The layers that the adapter's file has say which: `transformer.h.0.attn` is `h.0.attn` in files of GPT-2.
    """
    files = list(modules)
    endings = gathered((ending, module) for module in files for ending in _endings(module))
    renamed: dict[str, str] = {}
    for layer in layers:
        if ending := next((one for one in _endings(layer) if len(endings.get(one, ())) == 1), ""):
            renamed.setdefault(endings[ending][0].removesuffix(ending), layer.removesuffix(ending))
    for module in files:
        start = max((one for one in renamed if module.startswith(one)), key=len, default="")
        yield renamed.get(start, "") + module.removeprefix(start)


def _endings(name: str) -> Iterator[str]:
    """Yield the name with ever fewer leading components."""
    yield name
    yield from (name[match.end() :] for match in re.finditer(r"\.", name))
