"""Soak of the stage `merged`: delta, merged and safely merged weight of every adapted layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from consistency.capture.names import DELTA, SAFE_WEIGHT, WEIGHT, module_place
from consistency.worker.model.merging import adapted_layers
from consistency.worker.model.merging import merged as merge
from consistency.worker.soak.again import Again, Compare
from consistency.worker.stages.context import Context
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
                for safe, tensor in ((False, WEIGHT), (True, SAFE_WEIGHT)):
                    if compare.knows(place, tensor):
                        with merge(layer, safe=safe) as weight:
                            compare(place, tensor, weight)
                        del weight
            yield

    return again
