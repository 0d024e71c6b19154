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
from consistency.extras.merging.check_merged.wrappers import without_wrappers, wrapper_in
from consistency.worker.model.loading import UNUSABLE, class_and_labels

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "query_key_value": ("query", "key", "value"),
    "in_proj": ("q_proj", "k_proj", "v_proj"),
}
"""Projections that a writer may store as one matrix, its rows in this order."""


def fused_in(name: str) -> str:
    """Return the fused projection that a name is of; empty where it is of none."""
    return next((fused for fused in FUSED if f".{fused}." in f".{name}"), "")


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
            # In float32, which holds the factors that PEFT puts into a layer, whatever their dtype in the file is.
            return auto.from_config(config, trust_remote_code=case.trust_remote_code, dtype=torch.float32)
    except (ConsistencyError, *UNUSABLE):
        return None


def in_model(folder: Folder, model: Any) -> dict[str, Stored]:
    """Return a folder's tensors by their names in transformers' model; a tensor that it does not know keeps its name.

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
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    model_tensors, prefix = model.state_dict(), model.base_model_prefix
    tensors: dict[str, Stored] = {}
    # by the name of a conversion's result: the converter, and what it is made from
    groups: dict[str, tuple[Any, list[tuple[str, Stored]]]] = {}
    for key, stored in sorted(folder.tensors.items(), key=lambda item: dot_natural_key(item[0])):
        name, pattern = rename_source_key(key, renamings, converters, prefix, model_tensors)
        if name not in model_tensors and key in model_tensors:
            name, pattern = key, None
        if name not in model_tensors:
            tensors[key] = stored
        elif pattern is None:
            tensors[name] = replace(stored, name=name)
        else:
            groups.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, stored))
    for name, (converter, parts) in groups.items():
        tensors.update(_converted(name, converter, parts, model))
    return tensors


def without_place(folder: Folder, model: Any) -> set[str]:
    """Return the names of a folder's tensors that a model of transformers has no place for."""
    model_tensors = model.state_dict()
    placed: set[str] = set()
    for name, stored in in_model(folder, model).items():
        if name in model_tensors:
            placed.update(stored.keys)
    return {name for name, stored in folder.tensors.items() if not placed & set(stored.keys)}


def _converted(name: str, converter: Any, parts: list[tuple[str, Stored]], model: Any) -> Iterator[tuple[str, Stored]]:
    """Yield the results of a conversion; shapes are known without reading, by converting on the device `meta`."""

    def convert(tensor_of: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        fresh_converter = copy.deepcopy(converter)  # it keeps the tensors that are added
        for pattern, stored in parts:
            fresh_converter.add_tensor(name, stored.name, pattern, tensor_of(stored))
        results = fresh_converter.convert(name, model=model, config=model.config)
        return {key: result[0] if isinstance(result, list) else result for key, result in results.items()}

    @functools.lru_cache(maxsize=1)
    def read() -> dict[str, torch.Tensor]:
        return convert(lambda stored: stored.read())

    shapes = convert(lambda stored: torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
    keys = tuple(key for _, stored in parts for key in stored.keys)

    def read_result(key: str) -> torch.Tensor:
        result = read()[key]
        if len(shapes) == 1:
            read.cache_clear()  # several experts in one tensor: not held
        return result

    for key, empty in shapes.items():
        shape, read_key = tuple(empty.shape), functools.partial(read_result, key)
        yield key, Stored(name=key, keys=keys, shape=shape, dtype=empty.dtype, read=read_key)


def renamed(merged: dict[str, Stored], base: Mapping[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
    """Return a folder's tensors by the base's names, and in words how they were matched where they are not the same.

    Each part of a model may have another prefix, so prefixes are looked for until none matches any more.
    """
    tensors = {name: stored for name, stored in merged.items() if name in base}
    unmatched = {name: stored for name, stored in merged.items() if name not in base}
    absent = {name: stored for name, stored in base.items() if name not in tensors}
    texts = []
    for match in (_by_wrappers, _by_prefix, _by_parts):
        matched, text = match(unmatched, absent)
        while matched:
            texts.append(f"{len(matched)} {text}")
            tensors |= matched
            matched_keys = {key for stored in matched.values() for key in stored.keys}
            unmatched = {name: stored for name, stored in unmatched.items() if not matched_keys & set(stored.keys)}
            absent = {name: stored for name, stored in absent.items() if name not in matched}
            matched, text = match(unmatched, absent)
    return {**tensors, **unmatched}, texts


Matched = tuple[dict[str, Stored], str]
"""Tensors of the folder by names of the base, and in words how they were matched."""


def _by_wrappers(unmatched: Mapping[str, Stored], absent: Mapping[str, Stored]) -> Matched:
    """Match names into which wrappers of the model (FSDP, torch.compile, PEFT) put components of their own."""
    matched, wrappers = {}, []
    for name, stored in unmatched.items():
        base_name = without_wrappers(name)
        if base_name != name and _fits(stored, absent.get(base_name)):
            matched[base_name] = replace(stored, name=base_name)
            wrappers.append(wrapper_in(name))
    return matched, f"without {' and '.join(f'{wrapper}.' for wrapper in dict.fromkeys(wrappers))} in them"


def _by_prefix(unmatched: Mapping[str, Stored], absent: Mapping[str, Stored]) -> Matched:
    """Match names that differ by a prefix."""
    prefixes = common_prefix(unmatched, absent)
    if prefixes is None:
        return {}, ""
    prefix, base_prefix = prefixes
    matched = {}
    for name, stored in unmatched.items():
        base_name = f"{base_prefix}{name.removeprefix(prefix)}"
        if name.startswith(prefix) and _fits(stored, absent.get(base_name)):
            matched[base_name] = replace(stored, name=base_name)
    if not base_prefix:
        return matched, f"without their prefix {prefix}"
    if not prefix:
        return matched, f"by the prefix {base_prefix} of the base"
    return matched, f"by the prefix {prefix} for {base_prefix}"


def common_prefix(names: Iterable[str], others: Iterable[str]) -> tuple[str, str] | None:
    """Return the two prefixes by which most names differ from others, if any do: theirs, and the others'."""
    by_ending: dict[str, list[str]] = {}
    for name in others:
        for ending in endings(name):
            by_ending.setdefault(ending, []).append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in names:
        # An ending that several others have does not tell which one is meant.
        unique = next((ending for ending in endings(name) if len(by_ending.get(ending, ())) == 1), None)
        if unique is not None:
            votes[name.removesuffix(unique), by_ending[unique][0].removesuffix(unique)] += 1
    return votes.most_common(1)[0][0] if votes else None


def _by_parts(unmatched: Mapping[str, Stored], absent: Mapping[str, Stored]) -> Matched:
    """Take fused projections apart."""
    matched: dict[str, Stored] = {}
    fused_names = set()
    for name, stored in unmatched.items():
        fused = fused_in(name)
        parts = [name.replace(fused, part) for part in FUSED.get(fused, ())]
        sizes = [absent[part].shape[0] for part in parts if part in absent]
        if not parts or len(sizes) < len(parts) or sum(sizes) != stored.shape[0]:
            continue
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            rows = slice(start, start + size)
            start += size
            shape = (size, *stored.shape[1:])
            read = functools.partial(lambda rows, stored: stored.read()[rows], rows, stored)
            matched[part] = replace(stored, name=part, shape=shape, read=read, step=None)
        fused_names.add(fused)
    return matched, f"as parts of {', '.join(sorted(fused_names))}"


def _fits(stored: Stored, other: Stored | None) -> bool:
    """Return whether the shapes are the same, but for the number of rows, which a resized embedding has changed."""
    return other is not None and (stored.shape == other.shape or stored.shape[1:] == other.shape[1:])
