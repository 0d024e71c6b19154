"""What `adapter_config.json` states that loading does not check: another base, and fields that PEFT does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, cast

from consistency.capture.names import IGNORED_FIELDS, TRAINED_ON
from consistency.case.case import Case
from consistency.case.checkpoint import read_json
from consistency.case.recognition import repository_of
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.stages.context import Context


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
        found[TRAINED_ON] = f"{_name(given)}, this one is {' or '.join(sorted(own))}"
    ignored = _ignored(table, config)
    if ignored:
        found[IGNORED_FIELDS] = ignored
    return found


def _base_names(case: Case) -> set[str]:
    """Return what the base is called: its folder, and what its config says; nothing for one that a function makes."""
    if case.factory is not None:
        return set()
    stated_name = read_json(Path(case.base) / "config.json").get("_name_or_path")
    return {_name(case.base)} | ({_name(stated_name)} if isinstance(stated_name, str) and stated_name else set())


def _name(path: str) -> str:
    """Return the last component of a path or a hub id; of a snapshot in the hub's cache, that of its repository."""
    return (repository_of(PurePath(path)) or path.rstrip("/")).rpartition("/")[2]


def _ignored(table: Mapping[str, Any], config: Any) -> list[str]:
    """Return the fields that are set and that PEFT's class does not have."""
    known = {field.name for field in dataclasses.fields(config)}
    return sorted(name for name, value in table.items() if value and name not in known)
