"""Names of tensors from JSON files and safetensors headers alone, for the test items of stages: no torch, no data."""

from __future__ import annotations

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
    """Return the headers of the base's file; none of a factory's model."""
    if case.factory is not None:
        return {}
    return read_checkpoint(
        Path(case.base), stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle
    ).tensors


def expected(case: Case) -> list[tuple[str, str]]:
    """Return layer and tensor of what the adapter should hold."""
    config, tensors = adapter(case)
    return expected_places(config, tensors, weights_of(base_tensors(case)))


def adapter(case: Case) -> tuple[Mapping[str, Any], Mapping[str, TensorHeader]]:
    """Return the adapter's config and the headers of its tensors."""
    return ({}, {}) if case.adapter is None else read_adapter(Path(case.adapter), allow_pickle=case.allow_pickle)


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
    kinds: dict[str, list[dict[str, None]]] = {}
    for layer, tensors in parts.items():
        kinds.setdefault(_NUMBER.sub("*", layer), []).append(tensors)
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
    endings: dict[str, list[str]] = {}
    for module in files:
        for ending in _endings(module):
            endings.setdefault(ending, []).append(module)
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
