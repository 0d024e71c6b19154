"""The test items of the stage `generation`, from headers alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.case.case import Case
from consistency.extras.serving.generation.spec import SEQUENCES, WAYS
from consistency.stages.forward.items import forward_items


def generation_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and way of the stage `generation`, and its texts; the encoder of a decoder has no way of its own."""
    layers = dict.fromkeys(layer for layer, _ in forward_items(case))
    own = [layer for layer in layers if "encoder" not in layer.split(".")]
    yield from ((layer, way) for layer in own for way in WAYS)
    yield from ((f"prompt {number}", "text") for number in range(SEQUENCES if own else 0))
