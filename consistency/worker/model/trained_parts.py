"""Find layers of a saved LoRA that add nothing, and factors of which only one shard was saved.

Both load without an error and are the same on every device, so that no comparison shows them.

A layer adds nothing where one of its factors is zero: `lora_B` begins so, and stays so in layers that no gradient
reached.

Training on several devices may keep a part of each factor in each process, by rows or by columns. A process that saves
its own part in the shape of the whole leaves the rest zero: all that is not zero lies in one of n equal parts, the same
one in every block. Dead outputs leave rows of zeros too, but not at the same place in every block of a model.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from consistency.capture.adapter_remarks import AdapterFlaw, AdapterRemark
from consistency.capture.names import module_place
from consistency.capture.wording import counted, layers_text, listed

_FACTOR = re.compile(r"^(?P<layer>.+)\.(?P<part>lora_(?:embedding_)?[ABE])(?:\.weight)?$")
_CHANGES_MORE = re.compile(r"^(?P<layer>.+)\.(?:lora_magnitude_vector(?:\.weight)?|lora_B\.bias)$")
"""Tensors by which a layer with a factor of zeros changes something nevertheless: DoRA's magnitude, a bias."""

_NUMBERS_OF_SHARDS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
"""Numbers of processes whose shards are looked for."""

_LEAST_LAYERS = 2
"""Fewest layers of one kind in which the same shard alone is not zero: in a single one, outputs may be dead."""

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

Factors = Mapping[str, Mapping[str, torch.Tensor]]
"""Factors by layer and part: `lora_A` is (rank, in), `lora_B` (out, rank)."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """The part of a factor that is not zero: number `index`, from 0, of `of` equal parts of its rows or columns."""

    part: str
    axis: str
    index: int
    of: int

    def text(self) -> str:
        ordinal = _ORDINALS[self.index] if self.index < len(_ORDINALS) else f"{self.index + 1}th"
        return f"the {ordinal} of {self.of} equal parts of the {self.axis} of {self.part}"


def remarks_on(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[AdapterRemark]:
    """Return remarks on an adapter's tensors; none for methods other than LoRA.

    Parameters
    ----------
    tensors : iterable of (str, torch.Tensor)
        Keys in the adapter's file and tensors, on the CPU. Each tensor is read once.
    """
    factors, changes_more = _factors_of(tensors)
    untrained = _untrained(factors, changes_more)
    remarks = []
    # where no layer adds anything, another check says that the adapter has no effect
    if untrained and len(untrained) < len(factors):
        remarks.append(AdapterRemark(flaw=AdapterFlaw.UNTRAINED_LAYERS, text=_untrained_text(untrained, factors)))
    trained = {layer: parts for layer, parts in factors.items() if layer not in untrained}
    for shard, layers in _shards(trained).items():
        text = _shard_text(shard, layers, trained)
        remarks.append(AdapterRemark(flaw=AdapterFlaw.ONE_SHARD, text=text))
    return remarks


def _factors_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Factors, set[str]]:
    """Return the factors of each layer, and the layers that change something by other tensors too."""
    factors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    changes_more = set()
    for key, tensor in tensors:
        factor = _FACTOR.match(module_place(key))
        addition = _CHANGES_MORE.match(module_place(key))
        if factor is not None and tensor.dim() == 2:
            factors[factor["layer"]][factor["part"]] = tensor
        elif addition is not None:
            changes_more.add(addition["layer"])
    return factors, changes_more


def _untrained(factors: Factors, changes_more: set[str]) -> dict[str, str]:
    """Return the layers that add nothing, each with its factor of zeros."""
    untrained = {}
    for layer, parts in factors.items():
        zero_parts = [part for part, tensor in parts.items() if not bool(tensor.any())]
        if zero_parts and layer not in changes_more:
            untrained[layer] = zero_parts[-1]
    return untrained


def _untrained_text(untrained: Mapping[str, str], factors: Factors) -> str:
    parts = listed(sorted(set(untrained.values())))
    number = counted(len(factors), "adapted layer")
    verb = "adds" if len(untrained) == 1 else "add"
    return f"{len(untrained)} of {number} {verb} nothing, since {parts} is zero there: {layers_text(untrained)}"


def _shards(factors: Factors) -> dict[_Shard, list[str]]:
    """Return the shards that contain every nonzero element in all layers of some kind, each with these layers.

    A shard in the first quarter lies in the first half too, and two rows of 16 may be a shard of 8 or of 12. Among the
    shards that hold for a kind, the one that holds for the most layers is chosen, then the smallest.
    """
    layers_by_kind: dict[str, list[str]] = defaultdict(list)
    for layer in factors:
        layers_by_kind[_kind(layer)].append(layer)
    shards_by_kind: dict[str, set[_Shard]] = {}
    for kind, layers in layers_by_kind.items():
        if len(layers) >= _LEAST_LAYERS:
            shards_by_kind[kind] = set.intersection(*(set(_shards_of_layer(factors[layer])) for layer in layers))
    places = {(shard.part, shard.axis) for shard in itertools.chain.from_iterable(shards_by_kind.values())}
    chosen: dict[_Shard, list[str]] = {}
    for place in sorted(places):
        remaining = _shards_at(place, shards_by_kind)
        while remaining:
            shard = _most_frequent(remaining, layers_by_kind)
            kinds = [kind for kind, shards in remaining.items() if shard in shards]
            chosen[shard] = [layer for layer in factors if _kind(layer) in kinds]
            for kind in kinds:
                del remaining[kind]
    return chosen


def _shards_at(place: tuple[str, str], shards_by_kind: Mapping[str, set[_Shard]]) -> dict[str, set[_Shard]]:
    """Return the shards of one part and axis, by kind of layer; leave out kinds without any."""
    shards_there: dict[str, set[_Shard]] = {}
    for kind, shards in shards_by_kind.items():
        of_place = {shard for shard in shards if (shard.part, shard.axis) == place}
        if of_place:
            shards_there[kind] = of_place
    return shards_there


def _most_frequent(shards_by_kind: Mapping[str, set[_Shard]], layers_by_kind: Mapping[str, list[str]]) -> _Shard:
    """Return the shard of the most layers; among equals the one of the most, and so the smallest, parts."""
    counts = Counter[_Shard]()
    for kind, shards in shards_by_kind.items():
        for shard in shards:
            counts[shard] += len(layers_by_kind[kind])
    return max(counts, key=lambda shard: (counts[shard], shard.of))


def _kind(layer: str) -> str:
    """Return a layer's name without numbers, which it shares with its like in other blocks."""
    return re.sub(r"\d+", "N", layer)


def _shards_of_layer(parts: Mapping[str, torch.Tensor]) -> Iterator[_Shard]:
    """Yield the shards that contain every nonzero element of a factor.

    Columns of `lora_embedding_A` belong to tokens, and those that no text had stay zero. Rows of `lora_A` are zero
    where a rank was padded, and then `lora_B` has nothing for them either.
    """
    a, b = parts.get("lora_A"), parts.get("lora_B", parts.get("lora_embedding_B"))
    if b is not None:
        name = "lora_B" if "lora_B" in parts else "lora_embedding_B"
        yield from _shard(name, "rows", b.any(dim=1))
    if a is not None:
        yield from _shard("lora_A", "columns", a.any(dim=0))
        is_used = b.any(dim=0) if b is not None and b.shape[1] == a.shape[0] else torch.tensor(True)
        if bool((~a.any(dim=1) & is_used).any()):
            yield from _shard("lora_A", "rows", a.any(dim=1))


def _shard(part: str, axis: str, is_nonzero: torch.Tensor) -> Iterator[_Shard]:
    """Yield each shard that contains all nonzero rows or columns."""
    indices = is_nonzero.nonzero().reshape(-1)
    if not len(indices):
        return
    first, last, size = int(indices[0]), int(indices[-1]), len(is_nonzero)
    for number in _NUMBERS_OF_SHARDS:
        length = -(-size // number)  # torch.chunk gives each process so many, the last ones fewer
        if size >= number and first // length == last // length:
            yield _Shard(part, axis, first // length, number)


def _shard_text(shard: _Shard, layers: list[str], factors: Factors) -> str:
    example = layers[0]
    tensor = factors[example][shard.part]
    size = tensor.shape[0] if shard.axis == "rows" else tensor.shape[1]
    length = -(-size // shard.of)
    start, stop = shard.index * length, min(size, (shard.index + 1) * length)
    number = counted(len(factors), "adapted layer")
    nonzero = f"{shard.axis} {start}-{stop - 1} of {size} in {example}"
    return (
        f"in {len(layers)} of {number} all but {shard.text()} is zero ({nonzero}), as if one process had saved its "
        f"part alone: {layers_text(layers)}"
    )
