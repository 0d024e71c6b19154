"""Soak of the stage `merged`: delta, merged and safely merged weight and bias of every adapted layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from consistency.capture.names import BIAS, DELTA, SAFE_BIAS, SAFE_WEIGHT, WEIGHT, module_place
from consistency.worker.model.merging import adapted_layers
from consistency.worker.model.merging import merged as merge
from consistency.worker.soak.repeat import Again, Compare
from consistency.worker.stages.context import Context
from consistency.worker.stages.merged.forms.bias import bias_of
from consistency.worker.stages.merged.stage import delta_weight


def merged(context: Context, compare: Compare) -> Again:
    """Merge every layer again."""

    def again() -> Iterator[None]:
        for name, layer in adapted_layers(context.model):
            place = module_place(name)
            with context.base.onload(layer):
                if compare.knows(place, DELTA):
                    with torch.no_grad():
                        compare(place, DELTA, delta_weight(layer))
                for safe, tensor, beside in ((False, WEIGHT, BIAS), (True, SAFE_WEIGHT, SAFE_BIAS)):
                    if compare.knows(place, tensor):
                        with merge(layer, safe=safe) as weight:
                            compare(place, tensor, weight)
                            bias = bias_of(layer)
                            if bias is not None and compare.knows(place, beside):
                                compare(place, beside, bias)
                        del weight
            yield

    return again
