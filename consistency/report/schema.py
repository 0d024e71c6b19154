"""The JSON schemas of `report.json`, made from the types that write it."""

from __future__ import annotations

from typing import Any

import msgspec

from consistency.comparison.layers import LayerComparison
from consistency.comparison.result import Comparison, TensorComparison
from consistency.numerics.real import Real
from consistency.report.fleet.types import SCHEMA as FLEET_SCHEMA
from consistency.report.fleet.types import ReportOfGroups
from consistency.report.json import SCHEMA

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Tensor(TensorComparison, frozen=True, kw_only=True):
    """One tensor, or `count` of `layers` that are equal everywhere."""

    count: int = 1
    layers: tuple[str, ...] = ()


class Layer(LayerComparison, frozen=True, kw_only=True):
    """One tensor by architecture, or `count` of `layers` that are alike."""

    count: int = 1
    layers: tuple[str, ...] = ()


class Report(Comparison, frozen=True, kw_only=True):
    """Everything that a comparison found."""

    schema: str
    tool: str
    tensors: tuple[Tensor, ...]
    layers: tuple[Layer, ...] = ()


def document() -> dict[str, Any]:
    """Return one JSON schema for reports of either schema."""
    kinds: dict[str, Any] = {SCHEMA: Report, FLEET_SCHEMA: ReportOfGroups}
    found, components = msgspec.json.schema_components(kinds.values(), schema_hook=_hook, ref_template="#/$defs/{name}")
    for name, reference in zip(kinds, found, strict=True):
        report = components[reference["$ref"].rpartition("/")[2]]
        report["properties"]["schema"] = {"const": name}
    return {
        "$schema": _DIALECT,
        "title": "report.json of consistency",
        "description": f"{SCHEMA} has a row per worker and tensor; {FLEET_SCHEMA}, written for many workers, one per "
        "group of workers that saw the same.",
        "oneOf": list(found),
        "$defs": components,
    }


def _hook(kind: type) -> dict[str, Any]:
    if kind is Real:
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
    raise NotImplementedError(kind)
