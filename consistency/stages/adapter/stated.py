"""What `adapter_config.json` states that loading does not check: another base, unknown fields, an older layout."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, cast

from consistency.capture.names import IGNORED_FIELDS, OLDER_LAYOUT, THIS_BASE, TRAINED_ON
from consistency.capture.wording import some
from consistency.case.case import Case
from consistency.case.checkpoint import read_json
from consistency.case.recognition import repository_of
from consistency.worker.context import Context
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import adapted_layers


def stated(context: Context) -> dict[str, Any]:
    """Return the evidence: each only where it is so."""
    case, model = context.job.case, cast("Any", context.model)
    config = model.peft_config[ADAPTER_NAME]
    assert case.adapter is not None
    table = read_json(Path(case.adapter) / "adapter_config.json")
    own = _base_names(case)
    given = table.get("base_model_name_or_path")
    found: dict[str, Any] = {}
    if own and isinstance(given, str) and given.strip("/") and not own & {_name(given)}:
        found[TRAINED_ON] = f"{_name(given)}{THIS_BASE}{' or '.join(sorted(own))}"
    ignored = _ignored(table, config)
    if ignored:
        found[IGNORED_FIELDS] = ignored
    if older := _older_layout(table, model):
        found[OLDER_LAYOUT] = older
    return found


def _base_names(case: Case) -> set[str]:
    """Return what the base is called: its folder, and what its config says; nothing for one that a function makes."""
    if case.factory is not None:
        return set()
    stated_name = read_json(Path(case.base) / "config.json").get("_name_or_path")
    return {_name(case.base)} | ({_name(stated_name)} if isinstance(stated_name, str) and stated_name else set())


def _older_layout(table: Mapping[str, Any], model: Any) -> str:
    """Say which experts' factors an older PEFT laid out the other way round, where their shapes fit nevertheless.

    Where a parameter is not square, loading fails.
    """
    saved_by, own = (_release(version) for version in (table.get("peft_version"), importlib.metadata.version("peft")))
    if not saved_by or not own:
        return ""
    other = [
        name
        for name, layer in adapted_layers(model)
        if hasattr(layer, "get_param")
        and layer.get_param().dim() == 3
        and layer.in_features == layer.out_features
        and _exchanged(saved_by, layer) != _exchanged(own, layer)
    ]
    return f"PEFT {table['peft_version']} saved the experts of {some(other)}" if other else ""


def _release(version: object) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(map(int, found.groups())) if found else ()


def _exchanged(release: tuple[int, ...], layer: Any) -> bool:
    """Return whether a PEFT has `lora_A` of experts multiply by their last dimension, from its sources.

    0.18 never does; 0.19.0 where the experts say that they are transposed; 0.19.1 and later where they do not.
    """
    transposed = bool(getattr(layer.get_base_layer(), "is_transposed", False))
    return release >= (0, 19) and transposed == (release < (0, 19, 1))


def _name(path: str) -> str:
    """Return the last component of a path or a hub id; of a snapshot in the hub's cache, that of its repository."""
    return (repository_of(PurePath(path)) or path.rstrip("/")).rpartition("/")[2]


def _ignored(table: Mapping[str, Any], config: Any) -> list[str]:
    """Return the fields that are set and that PEFT's class does not have."""
    known = {field.name for field in dataclasses.fields(config)}
    return sorted(name for name, value in table.items() if value and name not in known)
