"""Mistakes that engines make with an adapter, planted in the model that an engine compiles.

All are values of weights, so that each has a graph that the healthy model has too, and inductor compiles no other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from consistency.case.case import Case
from consistency.worker.model.loading import ADAPTER_NAME, load_model
from consistency.worker.model.merging import adapted_layers


def adapter_ignored(case: Case) -> Any:
    return _with_delta_times(case, lambda _: 0.0)


def scaling_of_one(case: Case) -> Any:
    return _with_delta_times(case, lambda layer: 1 / layer.scaling[ADAPTER_NAME])


def upper_half_without(case: Case) -> Any:
    return _with_delta_times(case, lambda _: 0.0, share=0.5)


def merged_in_bfloat16(case: Case) -> Any:
    model: Any = load_model(msgspec.structs.replace(case, dtype="bfloat16"), "cpu")
    model.merge_adapter()
    return model.float()


def _with_delta_times(case: Case, factor: Callable[[Any], float], share: float = 1) -> Any:
    """Load the model, and multiply what the adapter adds to a share of the layers, the last ones."""
    model = load_model(case, "cpu")
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers[len(layers) - round(share * len(layers)) :]:
        layer.lora_B[ADAPTER_NAME].weight.data *= factor(layer)
    return model


MISTAKES: dict[str, Callable[[Case], Any]] = {
    "adapter ignored": adapter_ignored,
    "wrong scaling": scaling_of_one,
    "half of the layers": upper_half_without,
    "merged in bfloat16": merged_in_bfloat16,
}
