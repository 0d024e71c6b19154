"""`report.json`: the contract for programs, schema `consistency.report/1`; of many workers `consistency.report/2`.

In schema 1 every worker has a row of its own. Above `MANY_WORKERS` workers `report/fleet/` writes schema 2, in which
groups of workers stand for workers.

A report of schema 1 with more than `FOLD_ABOVE` rows is folded: tensors that are equal everywhere and whose rows are
the same to the last field, the copies of one weight in the layers of a model, become one entry with `count` and
`layers`, which are all their layers; its other fields are the first one's. The entries of `layers[]`, the tolerance
report, are folded alike. Below that nothing is folded, so that a program finds a tensor by its name. The file is
written tensor by tensor, because as a whole it can be larger than what it was made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from consistency.capture.json_codec import by_json_name, decode_json, encode_json
from consistency.capture.version import __version__
from consistency.comparison.layers import LayerComparison, layers_of
from consistency.comparison.result import Comparison, TensorComparison
from consistency.report.fleet import write
from consistency.report.fleet.read import read as read_fleet
from consistency.report.fleet.types import SCHEMA as FLEET_SCHEMA
from consistency.report.folding import fold, fold_layers
from consistency.report.formats import View
from consistency.report.summary import MOST_COLUMNS

SCHEMA = "consistency.report/1"

SCHEMAS = (SCHEMA, FLEET_SCHEMA)
"""The schemas that are read."""

MANY_WORKERS = MOST_COLUMNS
"""Workers up to which each has its rows, as it has a column of the page."""

FOLD_ABOVE = 100_000
"""Rows: at some 500 bytes each, a file of 50 MB that an editor still opens; eight GPUs on two load paths have fewer."""


def as_bytes(comparison: Comparison) -> bytes:
    """Return `report.json` as bytes."""
    return b"".join(render(comparison, View()))


def render(comparison: Comparison, view: View) -> Iterator[bytes]:
    """Yield `report.json` piece by piece: indented where nothing is folded, else with one line per tensor."""
    if (view.schema or schema_for(comparison)) == 2:
        yield from write.render(comparison, _FIRST)
        return
    table = by_json_name(comparison)
    first = {name: table[name] for name in _FIRST}
    table = {"schema": SCHEMA, "tool": __version__, **first, **table}
    layers = layers_of(comparison)
    if sum(len(tensor.rows) for tensor in comparison.tensors) <= FOLD_ABOVE:
        yield encode_json({**table, "layers": list(layers)}, indent=1) + b"\n"
        return
    opening = b"{\n"
    for name, value in table.items():
        yield opening + encode_json(name) + b": "
        yield from _lines(map(_entry, fold(comparison.tensors))) if name == "tensors" else [encode_json(value)]
        opening = b",\n"
    yield b',\n"layers": '
    yield from _lines(map(_entry, fold_layers(layers)))
    yield b"\n}\n"


def read(content: bytes) -> Comparison:
    """Return the comparison that `report.json` was written of, of either schema; raise what decoding it raises.

    Tensors that share an entry each get one again.
    """
    if decode_json(content, _Schema).schema == FLEET_SCHEMA:
        return read_fleet(content)
    found = decode_json(content, _Whole)
    tensors = [
        msgspec.structs.replace(one, layer=layer) for one in found.tensors for layer in one.layers or [one.layer]
    ]
    fields = {name: getattr(found, name) for name in Comparison.__struct_fields__}
    return Comparison(**{**fields, "tensors": tuple(tensors)})


class _Tensor(TensorComparison, frozen=True, kw_only=True):
    """An entry of `tensors[]`: of several equal ones the first, and the layers of all."""

    layers: tuple[str, ...] = ()


class _Whole(Comparison, frozen=True, kw_only=True):
    tensors: tuple[_Tensor, ...] = ()


class _Schema(msgspec.Struct, frozen=True):
    schema: str = ""


def schema_for(comparison: Comparison) -> int:
    """Return the number of the schema that a comparison is written in, unless another is asked for."""
    return 2 if len(comparison.workers) > MANY_WORKERS else 1


_FIRST = ("created", "host", "command", "elapsed_s", "versions", "simulated", "planted", "verdict")
"""Fields that stand before the others: where a report is from, and what nobody must mistake it for."""


def _entry(found: tuple[TensorComparison | LayerComparison, Sequence[str]]) -> object:
    """Return an entry of `tensors[]` or `layers[]`."""
    first, layers = found
    return first if len(layers) == 1 else {**by_json_name(first), "count": len(layers), "layers": layers}


def _lines(entries: Iterable[object]) -> Iterator[bytes]:
    opening = b"[\n"
    for entry in entries:
        yield opening + encode_json(entry)
        opening = b",\n"
    yield b"[]" if opening == b"[\n" else b"\n]"
