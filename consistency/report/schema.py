"""The JSON schema of `report.json`, made from the types that write it."""

from __future__ import annotations

from typing import Any

import msgspec

from consistency.numerics.real import Real
from consistency.report.json import SCHEMA, ReportFile


def document() -> dict[str, Any]:
    """Return the JSON schema."""
    (found,), components = msgspec.json.schema_components(
        (ReportFile,), schema_hook=_hook, ref_template="#/$defs/{name}"
    )
    components["ReportFile"]["properties"]["schema"] = {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "report.json of consistency",
        **found,
        "$defs": components,
    }


def _hook(kind: type) -> dict[str, Any]:
    if kind is Real:
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
    raise NotImplementedError(kind)
