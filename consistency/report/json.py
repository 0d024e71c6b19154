"""`report.json`: the contract for programs, schema `consistency.report/1`.

A report of more than `FOLD_ABOVE` rows is folded: tensors that are equal everywhere and whose rows are the same to the
last field, the copies of one weight in the layers of a model, become one entry with `count` and `layers`, which are all
their layers; its other fields are the first one's. The entries of `layers[]`, the tolerance report, are folded alike.
Below that nothing is folded, so that a program finds a tensor by its name. The file is written tensor by tensor,
because as a whole it can be larger than what it was made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from consistency.capture.json_codec import by_json_name, encode_json
from consistency.capture.version import __version__
from consistency.comparison.layers import LayerComparison, layers_of
from consistency.comparison.result import Comparison, TensorComparison
from consistency.report.formats import View

T = TypeVar("T", TensorComparison, LayerComparison)

SCHEMA = "consistency.report/1"

FOLD_ABOVE = 100_000
"""Rows: at some 500 bytes each, a file of 50 MB that an editor still opens; eight GPUs on two load paths have fewer."""


def as_bytes(comparison: Comparison) -> bytes:
    """Return `report.json` as bytes."""
    return b"".join(render(comparison, View()))


def render(comparison: Comparison, _: View) -> Iterator[bytes]:
    """Yield `report.json` piece by piece: indented where nothing is folded, else with one line per tensor."""
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
        yield from _lines(fold(comparison.tensors)) if name == "tensors" else [encode_json(value)]
        opening = b",\n"
    yield b',\n"layers": '
    yield from _lines(fold_layers(layers))
    yield b"\n}\n"


_FIRST = ("created", "host", "command", "elapsed_s", "versions", "simulated", "planted", "verdict")
"""Fields that stand before the others: where a report is from, and what nobody must mistake it for."""


@dataclass(slots=True)
class _Fold(Generic[T]):
    """Tensors that share one entry."""

    first: T
    layers: list[str] = field(default_factory=list)

    def entry(self) -> T | dict[str, Any]:
        if len(self.layers) == 1:
            return self.first
        fields = by_json_name(self.first)
        return {**fields, "count": len(self.layers), "layers": self.layers}


def fold(tensors: Sequence[TensorComparison]) -> Iterator[TensorComparison | dict[str, Any]]:
    """Yield the entries of `tensors[]`, each in the place of its first tensor."""
    folds: list[_Fold[TensorComparison]] = []
    latest: dict[tuple[Any, ...], _Fold[TensorComparison]] = {}
    for tensor in tensors:
        if not tensor.is_equal:
            folds.append(_Fold(tensor, [tensor.layer]))
            continue
        key = (tensor.stage, tensor.load_path, tensor.tensor, tensor.shape, tensor.dtype, tensor.rule, tensor.classes)
        into = latest.get(key)
        if into is None or into.first.rows != tensor.rows:  # to the last one alone: to try all would be quadratic
            into = latest[key] = _Fold(tensor)
            folds.append(into)
        into.layers.append(tensor.layer)
    return (one.entry() for one in folds)


def fold_layers(layers: Iterable[LayerComparison]) -> Iterator[LayerComparison | dict[str, Any]]:
    """Yield the entries of `layers[]`, each in the place of its first layer."""
    folds: list[_Fold[LayerComparison]] = []
    latest: dict[tuple[str, ...], _Fold[LayerComparison]] = {}
    for one in layers:
        key = (one.stage, one.load_path, one.tensor)
        into = latest.get(key)
        if into is None or into.first.architectures != one.architectures:
            into = latest[key] = _Fold(one)
            folds.append(into)
        into.layers.append(one.layer)
    return (fold.entry() for fold in folds)


def _lines(entries: Iterable[object]) -> Iterator[bytes]:
    opening = b"[\n"
    for entry in entries:
        yield opening + encode_json(entry)
        opening = b",\n"
    yield b"[]" if opening == b"[\n" else b"\n]"
