"""The test items of the stage `generation`, from headers alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.case.case import Case
from consistency.extras.serving.generation.spec import SEQUENCES, WAYS
from consistency.stages.forward.items import forward_items


def generation_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and way of the stage `generation`, and then prompt and `text`.

    The layers of an encoder beside a decoder are left out: it reads the whole text at once in every way.
    """
    layers = dict.fromkeys(layer for layer, _ in forward_items(case))
    layers_in_ways = [layer for layer in layers if "encoder" not in layer.split(".")]
    for layer in layers_in_ways:
        for way in WAYS:
            yield layer, way
    if layers_in_ways:
        for number in range(SEQUENCES):
            yield f"prompt {number}", "text"
