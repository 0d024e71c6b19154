"""Whether a saved LoRA is whole and trained: layers that add nothing, and factors of which one shard was saved.

Both load without an error and are the same on every device, so that no comparison shows them.

A layer adds nothing where one of its factors is zero: `lora_B` begins so, and stays so in layers that no gradient
reached.

Training on several devices may keep a part of each factor in each process, by rows or by columns. A process that saves
its own part in the shape of the whole leaves the rest zero: all that is not zero lies in one of n equal parts, the same
one in every block. Dead outputs leave rows of zeros too, but not at the same place in every block of a model.
"""

from __future__ import annotations

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
"""What lets a layer with a factor of zeros change something nevertheless: DoRA's magnitude, a bias."""

_NUMBERS_OF_SHARDS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
"""How many processes are looked for."""

_LEAST_LAYERS = 2
"""Layers of one kind that have to lack the same part: in one layer alone it may be dead outputs."""

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

Factors = Mapping[str, Mapping[str, torch.Tensor]]
"""By layer and part: `lora_A` is (rank, in), `lora_B` (out, rank)."""


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
    """Return what shows in an adapter's tensors, by their keys in its file; nothing for methods other than LoRA.

    Parameters
    ----------
    tensors : iterable of (str, torch.Tensor)
        Keys and tensors, on the CPU. Each tensor is read once.
    """
    factors, changes_more = _factors_of(tensors)
    untrained = _untrained(factors, changes_more)
    remarks = []
    if untrained and len(untrained) < len(factors):  # of all of them it is said elsewhere: the adapter has no effect
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
        other = _CHANGES_MORE.match(module_place(key))
        if factor is not None and tensor.dim() == 2:
            factors[factor["layer"]][factor["part"]] = tensor
        elif other is not None:
            changes_more.add(other["layer"])
    return factors, changes_more


def _untrained(factors: Factors, changes_more: set[str]) -> dict[str, str]:
    """Return the layers that add nothing, each with its factor of zeros."""
    untrained = {}
    for layer, parts in factors.items():
        zero = [part for part, tensor in parts.items() if not bool(tensor.any())]
        if zero and layer not in changes_more:
            untrained[layer] = zero[-1]
    return untrained


def _untrained_text(untrained: Mapping[str, str], factors: Factors) -> str:
    parts = listed(sorted(set(untrained.values())))
    number = counted(len(factors), "adapted layer")
    verb = "adds" if len(untrained) == 1 else "add"
    return f"{len(untrained)} of {number} {verb} nothing, since {parts} is zero there: {layers_text(untrained)}"


def _shards(factors: Factors) -> dict[_Shard, list[str]]:
    """Return the parts that alone are not zero in every layer of some kind, each with all of these layers.

    What lies in the first quarter lies in the first half too, and two rows of 16 may be one of 8 or of 12 shares. Of
    all that hold, those of the most layers are taken, then the smallest.
    """
    by_kind: dict[str, list[str]] = defaultdict(list)
    for layer in factors:
        by_kind[_kind(layer)].append(layer)
    of_kinds: dict[str, set[_Shard]] = {}
    for kind, layers in by_kind.items():
        if len(layers) >= _LEAST_LAYERS:
            of_kinds[kind] = set.intersection(*(set(_shards_of_layer(factors[layer])) for layer in layers))
    chosen: dict[_Shard, list[str]] = {}
    for part, axis in sorted({(shard.part, shard.axis) for shards in of_kinds.values() for shard in shards}):
        left = {
            kind: alike
            for kind, shards in of_kinds.items()
            if (alike := {shard for shard in shards if (shard.part, shard.axis) == (part, axis)})
        }
        while left:
            counts = Counter(shard for kind, shards in left.items() for shard in shards for _ in by_kind[kind])
            shard = max(counts, key=lambda one: (counts[one], one.of))
            kinds = [kind for kind, shards in left.items() if shard in shards]
            chosen[shard] = [layer for layer in factors if _kind(layer) in kinds]
            for kind in kinds:
                del left[kind]
    return chosen


def _kind(layer: str) -> str:
    """Return what layers of all blocks have in common: their name without numbers."""
    return re.sub(r"\d+", "N", layer)


def _shards_of_layer(parts: Mapping[str, torch.Tensor]) -> Iterator[_Shard]:
    """Yield which part alone of each factor is not zero.

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


def _shard(part: str, axis: str, is_held: torch.Tensor) -> Iterator[_Shard]:
    """Yield each of several equal parts that has all that is held."""
    places = is_held.nonzero().reshape(-1)
    if not len(places):
        return
    first, last, size = int(places[0]), int(places[-1]), len(is_held)
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
    held = f"{shard.axis} {start}-{stop - 1} of {size} in {example}"
    return (
        f"in {len(layers)} of {number} all but {shard.text()} is zero ({held}), as if one process had saved its part "
        f"alone: {layers_text(layers)}"
    )
