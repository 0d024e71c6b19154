"""Say what is wrong with a saved adapter itself: what every device shows alike, so that no comparison does.

A layer adds nothing where one of its factors is zero: `lora_B` begins so, and stays so in layers that no gradient
reached. One process's part of a factor may be saved as if it were the whole. File and config may not fit each other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from consistency.capture.adapter_remarks import AdapterFlaw, AdapterRemark
from consistency.capture.wording import counted, layers_text, listed, some
from consistency.worker.model.saved_adapter import config_fit
from consistency.worker.model.saved_adapter.contents import TensorContents, by_layer
from consistency.worker.model.saved_adapter.shards import Factors, Shard, shards
from consistency.worker.model.saved_adapter.untrained import inert_part, is_known_method

_FACTOR = re.compile(r"lora_(?:embedding_)?[ABE]")

_LEAST_NEIGHBOURS = 4
"""Layers of one kind from which the usual magnitude of their factors is taken."""

_FAR = 1024.0
"""How many times larger or smaller than the median of its kind the largest element of a factor may be.

Chosen and not derived, so that it makes a warning and no verdict: no adapter that was
trained here comes near it, and a step that diverges passes it soon.
"""

_MOST_NAMED = 4


def remarks_on_values(contents: Sequence[TensorContents], *, says_all: bool) -> list[AdapterRemark]:
    """Return what the values show: layers that add nothing, one process's part, magnitudes far from the others'.

    Parameters
    ----------
    contents : sequence of TensorContents
        Of all floating-point tensors of the file.
    says_all : bool
        Say it too where no layer adds anything; a run says that by what the adapter does to the outputs.
    """
    layers = {layer: parts for layer, parts in by_layer(contents).items() if is_known_method(parts)}
    # `q_proj.lora_B.bias` is read as the tensor `bias` of a layer `q_proj.lora_B`: it changes q_proj if lora_B is 0 too
    with_bias = {tensor.layer.removesuffix(".lora_B") for tensor in contents if tensor.layer.endswith(".lora_B")}
    untrained = {}
    for layer, parts in layers.items():
        inert = inert_part(parts)
        if inert and layer not in with_bias:
            untrained[layer] = inert
    remarks = []
    if untrained and (says_all or len(untrained) < len(layers)):
        is_zero = all(layers[layer][part].is_zero for layer, part in untrained.items())
        remarks.append(_untrained_remark(untrained, len(layers), "zero there" if is_zero else "as before any training"))
    factors = {layer: _factors(parts) for layer, parts in layers.items() if layer not in untrained}
    factors = {layer: parts for layer, parts in factors.items() if parts}
    for shard, names in shards(factors).items():
        remarks.append(AdapterRemark(flaw=AdapterFlaw.ONE_SHARD, text=_shard_text(shard, names, factors)))
    remarks.extend(_far_from_neighbours(factors))
    return remarks


def remarks_on_config(
    config: Mapping[str, Any], contents: Sequence[TensorContents], keys: Collection[str]
) -> list[AdapterRemark]:
    """Return what the file and adapter_config.json say differently."""
    mismatches = config_fit.mismatches(config, by_layer(contents), keys)
    return [
        AdapterRemark(
            flaw=AdapterFlaw.CONFIG_MISMATCH, text=mismatch.text, todo=mismatch.todo, is_error=mismatch.is_error
        )
        for mismatch in mismatches
    ]


def _factors(parts: Mapping[str, TensorContents]) -> dict[str, TensorContents]:
    """Return the matrices among the tensors of a layer that are factors of a LoRA, by name."""
    return {part: tensor for part, tensor in parts.items() if _FACTOR.fullmatch(part) and len(tensor.shape) == 2}


def _untrained_remark(untrained: Mapping[str, str], layers: int, state: str) -> AdapterRemark:
    names = listed(sorted(set(untrained.values())))
    verb = "adds" if len(untrained) == 1 else "add"
    text = (
        f"{len(untrained)} of {counted(layers, 'adapted layer')} {verb} nothing, since {names} is {state}: "
        f"{layers_text(untrained)}"
    )
    return AdapterRemark(flaw=AdapterFlaw.UNTRAINED_LAYERS, text=text)


def _shard_text(shard: Shard, layers: list[str], factors: Factors) -> str:
    example = layers[0]
    number = counted(len(factors), "adapted layer")
    return (
        f"in {len(layers)} of {number} all but {shard.text()} is zero "
        f"({shard.range_in(factors[example][shard.part])} in {example}), as if one process had saved its part alone: "
        f"{layers_text(layers)}"
    )


def _far_from_neighbours(factors: Factors) -> Iterator[AdapterRemark]:
    """Yield factors whose largest element is far from that of the same factor in other blocks."""
    by_kind: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for layer, parts in factors.items():
        for part, tensor in parts.items():
            # a factor of zeros is no odd one: its layer is untrained, or has an effect by DoRA's magnitude alone
            if not tensor.is_zero:
                by_kind[re.sub(r"\d+", "N", layer), part][layer] = tensor.largest
    odd: list[str] = []
    for (_, part), largest in by_kind.items():
        if len(largest) < _LEAST_NEIGHBOURS:
            continue
        usual = float(np.median(list(largest.values())))
        for layer, value in largest.items():
            if value > _FAR * usual or value * _FAR < usual:
                odd.append(f"{part} of {layer} (at most {value:.2g}, usually {usual:.2g})")
    if odd:
        yield AdapterRemark(
            flaw=AdapterFlaw.ODD_MAGNITUDE,
            text=f"{counted(len(odd), 'factor')} far larger or smaller than in the other blocks: "
            f"{some(odd, _MOST_NAMED)}",
        )
