"""Read names of tensors from JSON files and safetensors headers, for the test items of stages: no torch, no data."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from consistency.capture.names import adapter_place, is_method_tensor
from consistency.case.adapter_fit import read_adapter
from consistency.case.case import Case
from consistency.case.checkpoint import TensorHeader, read_checkpoint
from consistency.case.quantized import weights_of


def base_tensors(case: Case) -> Mapping[str, TensorHeader]:
    """Return the headers of the base's tensors, by their names in its files; none where a function makes the base."""
    if case.factory is not None:
        return {}
    return read_checkpoint(
        Path(case.base), stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle
    ).tensors


def expected(case: Case) -> list[tuple[str, str]]:
    """Return layer and tensor of every tensor that the adapter of a case should hold."""
    config, tensors = adapter(case)
    return expected_places(config, tensors, weights_of(base_tensors(case)))


def adapter(case: Case) -> tuple[Mapping[str, Any], Mapping[str, TensorHeader]]:
    """Return the adapter's config and the headers of its tensors; both empty without an adapter."""
    if case.adapter is None:
        return {}, {}
    return read_adapter(Path(case.adapter), allow_pickle=case.allow_pickle)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_OTHER_SIDE = {"A": "B", "B": "A"}
_NARROWED_BY = ("exclude_modules", "layers_to_transform", "layer_replication")
"""Fields by which a config adapts fewer or other layers than its `target_modules` names: only PEFT knows which."""


def expected_places(config: Mapping[str, Any], keys: Iterable[str], weights: Iterable[str]) -> list[tuple[str, str]]:
    """Return layer and tensor of every tensor that an adapter's method should have, in the order of the base.

    Parameters
    ----------
    config : mapping
        `adapter_config.json`.
    keys : iterable of str
        Names in the adapter's file. A layer should hold what most layers of its kind do, whose names are equal but for
        the numbers in them.
    weights : iterable of str
        Names of the base's weights in its file.
    """
    tensors_by_layer: dict[str, dict[str, None]] = {}
    for key in keys:
        if is_method_tensor(key):
            layer, tensor = adapter_place(key)
            tensors_by_layer.setdefault(layer, {})[tensor] = None
    targets = config.get("target_modules")
    is_narrowed = any(config.get(field) for field in _NARROWED_BY)
    if not tensors_by_layer or not isinstance(targets, list) or is_narrowed:
        return []
    layers_by_kind: dict[str, list[dict[str, None]]] = {}
    for layer, tensors in tensors_by_layer.items():
        layers_by_kind.setdefault(_kind(layer), []).append(tensors)
    usual_tensors = {kind: _usual(layers) for kind, layers in layers_by_kind.items()}
    # for a layer of a kind that the adapter's file does not have at all
    usual_of_any = _usual(itertools.chain.from_iterable(layers_by_kind.values()))
    modules = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    places = []
    for layer in in_model(modules, tensors_by_layer):
        if any(layer == target or layer.endswith(f".{target}") for target in targets):
            wanted = _both_sides(usual_tensors.get(_kind(layer), usual_of_any))
            places += [(layer, tensor) for tensor in wanted]
    return places


def _kind(layer: str) -> str:
    """Return a layer's name without numbers, which layers of one kind share: `model.layers.*.self_attn.q_proj`."""
    return _NUMBER.sub("*", layer)


def _usual(layers: Iterable[Iterable[str]]) -> list[str]:
    """Return the tensors that at least half of the layers have; each layer is given by its tensors."""
    layers = list(layers)
    counts = Counter(itertools.chain.from_iterable(layers))
    return [tensor for tensor, count in counts.items() if 2 * count >= len(layers)]


def _both_sides(tensors: Sequence[str]) -> Iterable[str]:
    """Return tensors with the other factor of each: `lora_B` beside `lora_A`."""
    other_factors = [f"{name[:-1]}{_OTHER_SIDE[name[-1]]}" for name in tensors if name.endswith(("_A", "_B"))]
    return dict.fromkeys([*tensors, *other_factors])


def in_model(modules: Iterable[str], layers: Iterable[str]) -> Iterator[str]:
    """Yield the names in the model of the base's modules, whose files may have other leading components.

    The layers in the adapter's file show which components: `transformer.h.0.attn` is `h.0.attn` in files of GPT-2.
    """
    file_names = list(modules)
    names_by_ending: dict[str, list[str]] = {}
    for name in file_names:
        for ending in _endings(name):
            names_by_ending.setdefault(ending, []).append(name)
    model_prefixes: dict[str, str] = {}  # by the leading components in the files
    for layer in layers:
        # an ending that several modules have does not show which of them the layer is
        ending = next((ending for ending in _endings(layer) if len(names_by_ending.get(ending, ())) == 1), "")
        if ending:
            file_prefix = names_by_ending[ending][0].removesuffix(ending)
            model_prefixes.setdefault(file_prefix, layer.removesuffix(ending))
    for name in file_names:
        prefix = max((prefix for prefix in model_prefixes if name.startswith(prefix)), key=len, default="")
        yield model_prefixes.get(prefix, "") + name.removeprefix(prefix)


def _endings(name: str) -> Iterator[str]:
    """Yield a dotted name with ever fewer leading components, down to one."""
    yield name
    for match in re.finditer(r"\.", name):
        yield name[match.end() :]
