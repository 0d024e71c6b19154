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
    """Return the evidence by its name: only the statements that do not fit this base or this PEFT."""
    case, model = context.job.case, cast("Any", context.model)
    config = model.peft_config[ADAPTER_NAME]
    assert case.adapter is not None
    table = read_json(Path(case.adapter) / "adapter_config.json")
    evidence: dict[str, Any] = {}
    base_names = _base_names(case)
    stated_base = table.get("base_model_name_or_path")
    if base_names and isinstance(stated_base, str) and stated_base.strip("/"):
        trained_on = _last_component(stated_base)
        if trained_on not in base_names:
            evidence[TRAINED_ON] = f"{trained_on}{THIS_BASE}{' or '.join(sorted(base_names))}"
    ignored = _ignored_fields(table, config)
    if ignored:
        evidence[IGNORED_FIELDS] = ignored
    older_layout = _older_layout(table, model)
    if older_layout:
        evidence[OLDER_LAYOUT] = older_layout
    return evidence


def _base_names(case: Case) -> set[str]:
    """Return the names of the base: of its folder, and in its config; none for a base that a function makes."""
    if case.factory is not None:
        return set()
    names = {_last_component(case.base)}
    name_in_config = read_json(Path(case.base) / "config.json").get("_name_or_path")
    if isinstance(name_in_config, str) and name_in_config:
        names.add(_last_component(name_in_config))
    return names


def _older_layout(table: Mapping[str, Any], model: Any) -> str:
    """Say which experts' factors an older PEFT laid out the other way round, where their shapes fit nevertheless.

    Where a parameter is not square, loading fails.
    """
    saved_by = _release(table.get("peft_version"))
    installed = _release(importlib.metadata.version("peft"))
    if not saved_by or not installed:
        return ""
    layers = [
        name
        for name, layer in adapted_layers(model)
        if _holds_square_experts(layer) and _is_exchanged(saved_by, layer) != _is_exchanged(installed, layer)
    ]
    return f"PEFT {table['peft_version']} saved the experts of {some(layers)}" if layers else ""


def _holds_square_experts(layer: Any) -> bool:
    """Return whether a layer adapts a stack of square matrices, whose factors fit either way round."""
    is_stack = hasattr(layer, "get_param") and layer.get_param().dim() == 3
    return is_stack and bool(layer.in_features == layer.out_features)


def _release(version: object) -> tuple[int, ...]:
    """Return the three numbers of a version; empty where it is none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return tuple(map(int, match.groups())) if match else ()


def _is_exchanged(release: tuple[int, ...], layer: Any) -> bool:
    """Return whether a PEFT has `lora_A` of experts multiply by their last dimension, from its sources.

    0.18 never does; 0.19.0 where the experts say that they are transposed; 0.19.1 and later where they do not.
    """
    transposed = bool(getattr(layer.get_base_layer(), "is_transposed", False))
    return release >= (0, 19) and transposed == (release < (0, 19, 1))


def _last_component(path: str) -> str:
    """Return the last component of a path or a hub id; of a snapshot in the hub's cache, that of its repository."""
    return (repository_of(PurePath(path)) or path.rstrip("/")).rpartition("/")[2]


def _ignored_fields(table: Mapping[str, Any], config: Any) -> list[str]:
    """Return the names of the fields that are set in the file and that PEFT's class does not have."""
    field_names = {field.name for field in dataclasses.fields(config)}
    return sorted(name for name, value in table.items() if value and name not in field_names)
