"""The stage `merged` again, in a soak."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from consistency.capture.names import (
    BIAS,
    DELTA,
    SAFE_BIAS,
    SAFE_WEIGHT,
    WEIGHT,
    module_place,
)
from consistency.case import standard
from consistency.stages.merged.forms.bias import bias_of
from consistency.stages.merged.worker import delta_weight
from consistency.worker.context import Context
from consistency.worker.ledger import Again, Ledger
from consistency.worker.model.merging import adapted_layers
from consistency.worker.model.merging import merged as merge


def merged(context: Context, ledger: Ledger) -> Again:
    """Merge every layer again."""

    def again() -> Iterator[None]:
        for name, layer in adapted_layers(context.model):
            place = module_place(name)
            with context.base.onload(layer):
                if ledger.knows((standard.MERGED, place, DELTA)):
                    with torch.no_grad():
                        ledger.see((standard.MERGED, place, DELTA), delta_weight(layer))
                for safe, tensor, beside in ((False, WEIGHT, BIAS), (True, SAFE_WEIGHT, SAFE_BIAS)):
                    if ledger.knows((standard.MERGED, place, tensor)):
                        with merge(layer, safe=safe) as weight:
                            ledger.see((standard.MERGED, place, tensor), weight)
                            bias = bias_of(layer)
                            if bias is not None:
                                ledger.see((standard.MERGED, place, beside), bias)
                        del weight
            yield

    return again
