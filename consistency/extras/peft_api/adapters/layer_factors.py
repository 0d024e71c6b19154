"""The factors of several LoRAs in one layer: those in the files, and those of their combination on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from consistency.extras.peft_api.adapters.multi_adapter_model import MultiAdapterModel
from consistency.numerics.dtype import UNIT_ROUNDOFF

# (dictionary of a layer, suffix of its parameters' names) for the factors of linear and convolution layers, then of
# embeddings; A first
_PAIRS = ((("lora_A", ".weight"), ("lora_B", ".weight")), (("lora_embedding_A", ""), ("lora_embedding_B", "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFactors:
    """The adapters that change one layer, as PEFT finds them in it."""

    parts: tuple[str, str]
    """What the two factors are called, A first."""
    names: tuple[str, ...]
    """Of these adapters."""
    weights: tuple[float, ...]
    scalings: tuple[float, ...]
    """`weights`, `scalings`: the weight of each in the combination, and its scaling in this layer."""
    a: tuple[np.ndarray, ...]
    b: tuple[np.ndarray, ...]
    """`a`, `b`: their factors as stored in their dtype on the device, float64."""
    dtype: torch.dtype
    is_transposed: bool
    """Whether the layer's deltas are (in, out)."""
    combined: tuple[torch.Tensor, ...] = ()
    """The factors of the combination, on the device; empty where it is not in the layer."""

    @property
    def rows(self) -> int:
        """Rows of the deltas as matrices."""
        return int(self.b[0].shape[0])

    @property
    def columns(self) -> int:
        return int(self.a[0].size // max(1, self.a[0].shape[0]))

    @property
    def delta_shape(self) -> tuple[int, int]:
        """Shape of the deltas as matrices, in the layer's own orientation."""
        return (self.columns, self.rows) if self.is_transposed else (self.rows, self.columns)


def factors_of(
    several: MultiAdapterModel, path: str, layer: Any, weights: Sequence[float], *, combined: str = ""
) -> Iterator[LayerFactors]:
    """Yield the factors of a layer, as far as adapters, and the combination of that name, have them."""
    for pair in _PAIRS:
        (first, suffix), (second, _) = pair
        held = getattr(layer, first, {})
        present = [
            (one, weight)
            for one, weight in zip(several.names, weights, strict=True)
            if f"{path}.{first}.{one}{suffix}" in several.expected[one] and one in held
        ]
        if not present or (combined and combined not in held):
            continue
        own = [_parameter(layer, part, suffix, present[0][0]) for part, _ in pair]
        if any(tensor.dtype not in UNIT_ROUNDOFF for tensor in own):
            continue
        yield LayerFactors(
            parts=(first, second),
            names=tuple(one for one, _ in present),
            weights=tuple(weight for _, weight in present),
            scalings=tuple(float(layer.scaling[one]) for one, _ in present),
            a=tuple(_stored(several, path, first, one, suffix, own[0]) for one, _ in present),
            b=tuple(_stored(several, path, second, one, suffix, own[1]) for one, _ in present),
            dtype=own[0].dtype,
            is_transposed=not suffix or bool(getattr(layer, "fan_in_fan_out", False)),
            combined=tuple(_parameter(layer, part, suffix, combined) for part, _ in pair) if combined else (),
        )


def _parameter(layer: Any, part: str, suffix: str, name: str) -> torch.Tensor:
    held = getattr(layer, part)[name]
    found = (held.weight if suffix else held).detach()
    assert isinstance(found, torch.Tensor)
    return found


def _stored(several: MultiAdapterModel, path: str, part: str, one: str, suffix: str, own: torch.Tensor) -> np.ndarray:
    tensor = several.expected[one][f"{path}.{part}.{one}{suffix}"][1]
    return tensor.to(own.dtype).to(torch.float64).numpy()
