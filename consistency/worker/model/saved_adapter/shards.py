"""Find factors of which one process's part was saved in the shape of the whole. No torch here.

Training on several devices may keep a part of each factor in each process, by rows or by columns. A process that saves
its own part in the shape of the whole leaves the rest zero: all that is not zero lies in one of n equal parts, the same
one in every block. Dead outputs leave rows of zeros too, but not at the same place in every block of a model.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from consistency.worker.model.saved_adapter.contents import TensorContents

_NUMBERS_OF_SHARDS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
"""How many processes are looked for."""

_LEAST_LAYERS = 2
"""Layers of one kind that have to lack the same part: in one layer alone it may be dead outputs."""

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

Factors = Mapping[str, Mapping[str, TensorContents]]
"""Factors by the names of layer and part; `lora_A` is (rank, in), `lora_B` (out, rank)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a factor that is not zero: number `index`, from 0, of `of` equal parts of its rows or columns."""

    part: str
    axis: str
    index: int
    of: int

    def text(self) -> str:
        """Return the part in words: `the first of 4 equal parts of the rows of lora_B`."""
        ordinal = _ORDINALS[self.index] if self.index < len(_ORDINALS) else f"{self.index + 1}th"
        return f"the {ordinal} of {self.of} equal parts of the {self.axis} of {self.part}"

    def range_in(self, factor: TensorContents) -> str:
        """Return the range that this part takes in a factor: `rows 0-15 of 64`."""
        size = factor.shape[0 if self.axis == "rows" else 1]
        length = -(-size // self.of)
        start, stop = self.index * length, min(size, (self.index + 1) * length)
        return f"{self.axis} {start}-{stop - 1} of {size}"


def shards(factors: Factors) -> dict[Shard, list[str]]:
    """Return the parts that alone are not zero in every layer of some kind, each with all of these layers.

    What lies in the first quarter lies in the first half too, and two rows of 16 may be one of 8 or of 12 shares. Of
    all that hold, those of the most layers are taken, then the smallest.
    """
    layers_by_kind: dict[str, list[str]] = defaultdict(list)
    for layer in factors:
        layers_by_kind[_kind(layer)].append(layer)
    candidates: dict[str, set[Shard]] = {}
    for kind, layers in layers_by_kind.items():
        if len(layers) >= _LEAST_LAYERS:
            candidates[kind] = set.intersection(*(set(_shards_of_layer(factors[layer])) for layer in layers))
    chosen: dict[Shard, list[str]] = {}
    axes = {(shard.part, shard.axis) for of_kind in candidates.values() for shard in of_kind}
    for axis in sorted(axes):
        remaining = {kind: _of_axis(of_kind, axis) for kind, of_kind in candidates.items()}
        remaining = {kind: of_kind for kind, of_kind in remaining.items() if of_kind}
        while remaining:
            layers_with: Counter[Shard] = Counter()
            for kind, of_kind in remaining.items():
                layers_with.update(dict.fromkeys(of_kind, len(layers_by_kind[kind])))
            shard = max(layers_with, key=lambda candidate: (layers_with[candidate], candidate.of))
            kinds = [kind for kind, of_kind in remaining.items() if shard in of_kind]
            chosen[shard] = [layer for layer in factors if _kind(layer) in kinds]
            for kind in kinds:
                del remaining[kind]
    return chosen


def _of_axis(candidates: set[Shard], axis: tuple[str, str]) -> set[Shard]:
    return {shard for shard in candidates if (shard.part, shard.axis) == axis}


def _kind(layer: str) -> str:
    """Return what layers of all blocks have in common: their name without numbers."""
    return re.sub(r"\d+", "N", layer)


def _shards_of_layer(parts: Mapping[str, TensorContents]) -> Iterator[Shard]:
    """Yield which part alone of each factor is not zero.

    Columns of `lora_embedding_A` belong to tokens, and those that no text had stay zero. Rows of `lora_A` are zero
    where a rank was padded, and then `lora_B` has nothing for them either.
    """
    a = parts.get("lora_A")
    name = "lora_B" if "lora_B" in parts else "lora_embedding_B"
    b = parts.get(name)
    if b is not None:
        yield from _shard(name, "rows", b.rows)
    if a is None:
        return
    yield from _shard("lora_A", "columns", a.columns)
    is_used = np.ones(a.shape[0], bool)
    if b is not None and b.shape[1] == a.shape[0]:
        is_used = b.columns
    if bool((~a.rows & is_used).any()):
        yield from _shard("lora_A", "rows", a.rows)


def _shard(part: str, axis: str, is_held: np.ndarray) -> Iterator[Shard]:
    """Yield each of several equal parts that has all that is held."""
    places = is_held.nonzero()[0]
    if not len(places):
        return
    first, last, size = int(places[0]), int(places[-1]), len(is_held)
    for number in _NUMBERS_OF_SHARDS:
        length = -(-size // number)  # torch.chunk gives each process so many, the last ones fewer
        if size >= number and first // length == last // length:
            yield Shard(part, axis, first // length, number)
