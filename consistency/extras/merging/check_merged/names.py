"""One set of names for base, adapter and merged folder, however their writers call and pack the same weights.

Names are the base's. Where they do not match as they are, both folders are brought to the names of transformers'
model by its own conversion mapping, which renames, stacks experts, and fuses and splits projections; what is left is
matched by prefixes, and a fused projection is taken apart into its parts.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from consistency.case.adapter_fit import endings
from consistency.case.case import Case
from consistency.errors import ConsistencyError
from consistency.extras.merging.check_merged.folder import Folder, Stored
from consistency.worker.model.loading import UNUSABLE, class_and_labels

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "query_key_value": ("query", "key", "value"),
    "in_proj": ("q_proj", "k_proj", "v_proj"),
}
"""Projections that a writer may store as one matrix, its rows in this order."""


def fused_in(name: str) -> str:
    """Return which of these a name has in it, if any."""
    return next((one for one in FUSED if f".{one}." in f".{name}"), "")


def model_of(case: Case) -> Any:
    """Return the base's model without weights, on the device `meta`; None where transformers cannot make it."""
    try:
        auto, labels = class_and_labels(case)
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(case.base, trust_remote_code=case.trust_remote_code)
        if labels is not None:
            config.num_labels = labels
        config.quantization_config = None  # its tensors are dequantized here
        with torch.device("meta"):
            # in float32, which holds what PEFT puts into a layer's factors whatever their dtype in the file is
            return auto.from_config(config, trust_remote_code=case.trust_remote_code, dtype=torch.float32)
    except (ConsistencyError, *UNUSABLE):
        return None


def in_model(folder: Folder, model: Any) -> dict[str, Stored]:
    """Return a folder's tensors by their names in transformers' model; what it does not know keeps its name.

    The tensors of a conversion are read together when one of its results is.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Stored] = {}
    groups: dict[str, tuple[Any, list[tuple[str, Stored]]]] = {}
    for key, stored in sorted(folder.tensors.items(), key=lambda item: dot_natural_key(item[0])):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if name not in known:
            found[key] = stored
        elif pattern is None:
            found[name] = replace(stored, name=name)
        else:
            groups.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, stored))
    for name, (converter, parts) in groups.items():
        found.update(_converted(name, converter, parts, model))
    return found


def without_place(folder: Folder, model: Any) -> set[str]:
    """Return the names of a folder's tensors that a model of transformers has no place for."""
    known = model.state_dict()
    placed = {key for name, stored in in_model(folder, model).items() if name in known for key in stored.keys}
    return {name for name, stored in folder.tensors.items() if not placed & set(stored.keys)}


def _converted(name: str, converter: Any, parts: list[tuple[str, Stored]], model: Any) -> Iterator[tuple[str, Stored]]:
    def convert(tensor: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(converter)
        for pattern, stored in parts:
            own.add_tensor(name, stored.name, pattern, tensor(stored))
        made = own.convert(name, model=model, config=model.config)
        return {key: one[0] if isinstance(one, list) else one for key, one in made.items()}

    @functools.lru_cache(maxsize=1)
    def read() -> dict[str, torch.Tensor]:
        return convert(lambda stored: stored.read())

    shapes = convert(lambda stored: torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
    keys = tuple(key for _, stored in parts for key in stored.keys)

    def one(key: str) -> torch.Tensor:
        result = read()[key]
        if len(shapes) == 1:
            read.cache_clear()  # several experts in one: not held
        return result

    for key, made in shapes.items():
        yield (
            key,
            Stored(name=key, keys=keys, shape=tuple(made.shape), dtype=made.dtype, read=functools.partial(one, key)),
        )


def renamed(merged: dict[str, Stored], base: Mapping[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
    """Return a folder's tensors by the base's names, and in words how they were matched where they are not the same.

    Those of each part of a model may begin otherwise, so prefixes are looked for until none matches any more.
    """
    found = {name: stored for name, stored in merged.items() if name in base}
    left = {name: stored for name, stored in merged.items() if name not in base}
    wanted = {name: stored for name, stored in base.items() if name not in found}
    how = []
    for match in (_by_prefix, _by_parts):
        matched, text = match(left, wanted)
        while matched:
            how.append(f"{len(matched)} names matched {text}")
            found |= matched
            used = {key for stored in matched.values() for key in stored.keys}
            left = {name: stored for name, stored in left.items() if not used & set(stored.keys)}
            wanted = {name: stored for name, stored in wanted.items() if name not in matched}
            matched, text = match(left, wanted)
    return {**found, **left}, how


Matched = tuple[dict[str, Stored], str]


def _by_prefix(left: Mapping[str, Stored], wanted: Mapping[str, Stored]) -> Matched:
    prefix = common_prefix(left, wanted)
    if prefix is None:
        return {}, ""
    add, drop = prefix
    pairs = {f"{drop}{name.removeprefix(add)}": stored for name, stored in left.items() if name.startswith(add)}
    text = f"by the prefix {add or 'no prefix'} for {drop or 'no prefix'}"
    return {name: replace(one, name=name) for name, one in pairs.items() if _fits(one, wanted.get(name))}, text


def common_prefix(left: Iterable[str], wanted: Iterable[str]) -> tuple[str, str] | None:
    """Return the two beginnings by which most names differ from others, if any do: theirs, and the others'."""
    by_ending: dict[str, list[str]] = {}
    for name in wanted:
        for ending in endings(name):
            by_ending.setdefault(ending, []).append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in left:
        unique = next((one for one in endings(name) if len(by_ending.get(one, ())) == 1), None)
        if unique is not None:
            votes[name.removesuffix(unique), by_ending[unique][0].removesuffix(unique)] += 1
    return votes.most_common(1)[0][0] if votes else None


def _by_parts(left: Mapping[str, Stored], wanted: Mapping[str, Stored]) -> Matched:
    """Take fused projections apart."""
    found: dict[str, Stored] = {}
    names = set()
    for name, stored in left.items():
        fused = fused_in(name)
        parts = [name.replace(fused, part) for part in FUSED.get(fused, ())]
        sizes = [wanted[part].shape[0] for part in parts if part in wanted]
        if not parts or len(sizes) < len(parts) or sum(sizes) != stored.shape[0]:
            continue
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            rows = slice(start, start := start + size)
            shape = (size, *stored.shape[1:])
            read = functools.partial(lambda rows, stored: stored.read()[rows], rows, stored)
            found[part] = replace(stored, name=part, shape=shape, read=read, step=None)
        names.add(fused)
    return found, f"as parts of {', '.join(sorted(names))}"


def _fits(stored: Stored, other: Stored | None) -> bool:
    return other is not None and (stored.shape == other.shape or stored.shape[1:] == other.shape[1:])
