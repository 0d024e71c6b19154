"""Tensors that are alike -> one of them and the layers of all: the copies of one weight in the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from consistency.comparison.layers import LayerComparison
from consistency.comparison.result import TensorComparison

T = TypeVar("T", TensorComparison, LayerComparison)


@dataclass(slots=True)
class _Fold(Generic[T]):
    """Tensors that share one entry."""

    first: T
    layers: list[str] = field(default_factory=list)


def fold(tensors: Sequence[TensorComparison]) -> Iterator[tuple[TensorComparison, Sequence[str]]]:
    """Yield tensors that are equal everywhere and whose rows are the same to the last field, and their layers.

    Each is the first of its kind and stands in its place; a tensor that differs anywhere stands alone.
    """
    folds: list[_Fold[TensorComparison]] = []
    latest: dict[tuple[Any, ...], _Fold[TensorComparison]] = {}
    for tensor in tensors:
        if not tensor.is_equal:
            folds.append(_Fold(tensor, [tensor.layer]))
            continue
        key = (tensor.stage, tensor.load_path, tensor.tensor, tensor.shape, tensor.dtype, tensor.rule, tensor.classes)
        into = latest.get(key)
        if into is None or not _same_rows(into.first, tensor):  # to the last one alone: to try all would be quadratic
            into = latest[key] = _Fold(tensor)
            folds.append(into)
        into.layers.append(tensor.layer)
    return ((one.first, one.layers) for one in folds)


def _same_rows(a: TensorComparison, b: TensorComparison) -> bool:
    groups = list(a.groups), list(b.groups)
    if len(groups[0]) != len(groups[1]) or a.workers != b.workers:
        return False
    return all(row == other and names == others for (row, names), (other, others) in zip(*groups, strict=True))


def fold_layers(layers: Iterable[LayerComparison]) -> Iterator[tuple[LayerComparison, Sequence[str]]]:
    """Yield tensors with the same cells, and their layers, each in the place of its first layer."""
    folds: list[_Fold[LayerComparison]] = []
    latest: dict[tuple[str, ...], _Fold[LayerComparison]] = {}
    for one in layers:
        key = (one.stage, one.load_path, one.tensor)
        into = latest.get(key)
        if into is None or into.first.architectures != one.architectures:
            into = latest[key] = _Fold(one)
            folds.append(into)
        into.layers.append(one.layer)
    return ((one.first, one.layers) for one in folds)
