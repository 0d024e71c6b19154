"""The fields of `report.json`, schema `consistency.report/2`: those of a comparison, with groups for workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from consistency.comparison.layers import LayerCell, LayerComparison
from consistency.comparison.merging import Merging
from consistency.comparison.result import (
    ArchitectureGroup,
    Comparison,
    Divergence,
    Finding,
    Row,
    Source,
    TensorComparison,
    WorkerSummary,
)

SCHEMA = "consistency.report/2"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Workers by name; fields of other entries refer to it by its place in `groups`. The first one holds all workers.

    Attributes
    ----------
    workers : tuple of str
        Patterns such as `node-[001-128]:cuda:[0-7]`: in brackets are numbers and ranges of them, and the last bracket
        runs fastest. A `[` of a name is `[[]`.
    count : int
        How many names they stand for.
    """

    workers: tuple[str, ...]
    count: int


def _like(
    name: str,
    base: type[msgspec.Struct],
    about: str,
    fields: Mapping[str, Any],
    *,
    without: str = "",
    optional: Any = None,
) -> type[msgspec.Struct]:
    """Return a type with the fields of another one: some have another type, and one is left out.

    Where it has `each`, any other field may be there instead.
    """
    found: list[Any] = []
    own = {one.name: one for one in msgspec.structs.fields(base)}
    for field in (*(field for field in fields if field not in own), *(field for field in own if field != without)):
        one = own.get(field)
        kind = fields[field] if one is None else fields.get(field, one.type)
        if optional and "each" in optional and field not in fields:
            found.append((field, kind | msgspec.UnsetType, msgspec.UNSET))
        elif one is None or one.required:
            found.append((field, kind))
        elif one.default is not msgspec.NODEFAULT:
            found.append((field, kind, one.default))
        else:
            found.append((field, kind, msgspec.field(default_factory=one.default_factory)))
    found += [(field, kind, default) for field, (kind, default) in (optional or {}).items()]
    return msgspec.defstruct(name, found, kw_only=True, frozen=True, omit_defaults=True, namespace={"__doc__": about})


_ID = {"workers": int}
_EACH: tuple[Any, Any] = (dict[str, list[Any] | str], {})

RowOfGroup: Any = _like(
    "RowOfGroup",
    Row,
    "One tensor on the workers of a group, which differ in nothing. `left_out` is the number of different rows that "
    "this one stands for without figures: the worst of them has the row before it.",
    _ID,
    without="worker",
    optional={"left_out": (int, 0)},
)
TensorOfGroups: Any = _like(
    "TensorOfGroups",
    TensorComparison,
    "One tensor, or `count` of `layers` that are equal everywhere. `classes` are groups of workers that agree bitwise; "
    "`classes_left_out` is the number of smaller ones that are not written.",
    {"classes": tuple[int, ...], "rows": tuple[RowOfGroup, ...]},
    optional={"count": (int, 1), "layers": (tuple[str, ...], ()), "classes_left_out": (int, 0)},
)
CellOfGroup: Any = _like(
    "CellOfGroup",
    LayerCell,
    "One tensor on the workers of one architecture.",
    {**_ID, "classes": tuple[int, ...]},
    optional={"classes_left_out": (int, 0)},
)
LayerOfGroups: Any = _like(
    "LayerOfGroups",
    LayerComparison,
    "One tensor by architecture, or `count` of `layers` that are alike.",
    {"architectures": dict[str, CellOfGroup]},
    optional={"count": (int, 1), "layers": (tuple[str, ...], ())},
)
WorkersOfGroup: Any = _like(
    "WorkersOfGroup",
    WorkerSummary,
    "Workers of one kind. `each` has a list of values, in the order of the group, for each field in which they differ, "
    "or the name of another field with the same list; `environment.NAME` is a name in the environment. `stage_memory` "
    "is written of few workers.",
    _ID,
    without="name",
    optional={"each": _EACH},
)
SourcesOfGroup: Any = _like(
    "SourcesOfGroup",
    Source,
    "Captures that differ in the fields of `each`; `names` are patterns as those of groups.",
    {"names": tuple[str, ...]},
    without="name",
    optional={"each": _EACH},
)
FindingOfGroup: Any = _like("FindingOfGroup", Finding, "Something to act on.", _ID)
DivergenceOfGroup: Any = _like(
    "DivergenceOfGroup",
    Divergence,
    "The first tensor, in the model's order, at which these workers diverge.",
    _ID,
    without="worker",
)
MergingOfGroup: Any = _like(
    "MergingOfGroup", Merging, "What merging does to the outputs, by these workers.", _ID, without="worker"
)
ArchitectureOfGroup: Any = _like("ArchitectureOfGroup", ArchitectureGroup, "Workers of one architecture.", _ID)
ReportOfGroups: Any = _like(
    "ReportOfGroups",
    Comparison,
    "Everything that a comparison of many workers found. `captures` are patterns as those of groups; of `hosts` only "
    "those with a problem are written, and `hosts_left_out` is the number of the others.",
    {
        "schema": str,
        "tool": str,
        "groups": tuple[Group, ...],
        "workers": tuple[WorkersOfGroup, ...],
        "architectures": tuple[ArchitectureOfGroup, ...],
        "tensors": tuple[TensorOfGroups, ...],
        "findings": tuple[FindingOfGroup, ...],
        "first_divergence": tuple[DivergenceOfGroup, ...],
        "first_bitwise_difference": tuple[DivergenceOfGroup, ...],
        "merging": tuple[MergingOfGroup, ...],
        "sources": tuple[SourcesOfGroup, ...],
    },
    optional={"hosts_left_out": (int, 0), "layers": (tuple[LayerOfGroups, ...], ())},
)
