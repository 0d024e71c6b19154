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
    """Names of the two factors in PEFT's layer, A first."""
    names: tuple[str, ...]
    """Names of these adapters."""
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
    multi_model: MultiAdapterModel, path: str, layer: Any, weights: Sequence[float], *, combined: str = ""
) -> Iterator[LayerFactors]:
    """Yield the factors of a layer, as far as adapters, and the combination of that name, have them."""
    for pair in _PAIRS:
        (first, suffix), (second, _) = pair
        factors_by_adapter = getattr(layer, first, {})
        weight_of = {}
        for name, weight in zip(multi_model.names, weights, strict=True):
            is_in_file = f"{path}.{first}.{name}{suffix}" in multi_model.expected[name]
            if is_in_file and name in factors_by_adapter:
                weight_of[name] = weight
        if not weight_of or (combined and combined not in factors_by_adapter):
            continue
        names = tuple(weight_of)
        a, b = (_parameter(layer, part, suffix, names[0]) for part in (first, second))
        if a.dtype not in UNIT_ROUNDOFF or b.dtype not in UNIT_ROUNDOFF:
            continue
        combined_factors: tuple[torch.Tensor, ...] = ()
        if combined:
            combined_factors = tuple(_parameter(layer, part, suffix, combined) for part in (first, second))
        yield LayerFactors(
            parts=(first, second),
            names=names,
            weights=tuple(weight_of.values()),
            scalings=tuple(float(layer.scaling[name]) for name in names),
            a=tuple(_stored(multi_model, path, first, name, suffix, a.dtype) for name in names),
            b=tuple(_stored(multi_model, path, second, name, suffix, b.dtype) for name in names),
            dtype=a.dtype,
            is_transposed=not suffix or bool(getattr(layer, "fan_in_fan_out", False)),
            combined=combined_factors,
        )


def _parameter(layer: Any, part: str, suffix: str, adapter: str) -> torch.Tensor:
    """Return a factor of an adapter in a layer; without a suffix PEFT holds the parameter itself, not a module."""
    factor = getattr(layer, part)[adapter]
    parameter = factor.weight if suffix else factor
    assert isinstance(parameter, torch.Tensor)
    return parameter.detach()


def _stored(
    multi_model: MultiAdapterModel, path: str, part: str, adapter: str, suffix: str, dtype: torch.dtype
) -> np.ndarray:
    """Return a factor of an adapter's file as a dtype stores it, in float64."""
    _, tensor = multi_model.expected[adapter][f"{path}.{part}.{adapter}{suffix}"]
    return tensor.to(dtype).to(torch.float64).numpy()
