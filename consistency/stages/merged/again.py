"""The stage `merged` again, as a soak repeats it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from consistency.capture.names import BIAS, DELTA, SAFE_BIAS, SAFE_WEIGHT, WEIGHT, module_place
from consistency.case import standard
from consistency.stages.merged.forms.bias import bias_of
from consistency.stages.merged.worker import delta_weight
from consistency.worker.context import Context
from consistency.worker.ledger import Again, Ledger
from consistency.worker.model.merging import adapted_layers
from consistency.worker.model.merging import merged as merge


def merged(context: Context, ledger: Ledger) -> Again:
    """Return what merges every layer again, and shows the results to the ledger."""

    def again() -> Iterator[None]:
        for name, layer in adapted_layers(context.model):
            with context.base.onload(layer):
                _merge_again(ledger, module_place(name), layer)
            yield

    return again


def _merge_again(ledger: Ledger, place: str, layer: Any) -> None:
    """Compute the tensors of a layer again that the stage has recorded."""
    if ledger.knows((standard.MERGED, place, DELTA)):
        with torch.no_grad():
            ledger.see((standard.MERGED, place, DELTA), delta_weight(layer))
    for safe, weight_row, bias_row in ((False, WEIGHT, BIAS), (True, SAFE_WEIGHT, SAFE_BIAS)):
        if not ledger.knows((standard.MERGED, place, weight_row)):
            continue
        with merge(layer, safe=safe) as weight:
            ledger.see((standard.MERGED, place, weight_row), weight)
            bias = bias_of(layer)
            if bias is not None:
                ledger.see((standard.MERGED, place, bias_row), bias)
        del weight  # or it is held while the safely merged one is made
