"""The passes of the stage `forward`. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON
from consistency.case.budget.costs import LEAST_PASSES, Setting
from consistency.case.budget.passes import Pass

MERGING = "merged, float64"
"""Title of the passes that measure what merging does to the outputs, from end to end."""


LONG_TEXT = "long text"
"""Title of the passes over the long text: that of the device, and those of the reference in some rows."""


def whole(mode: str) -> str:
    """Return the title of the device's pass from end to end."""
    return mode


def exact(mode: str) -> str:
    """Return the title of a pass in float64."""
    return f"{mode}, float64"


def noise(mode: str) -> str:
    """Return the title of the passes with noise."""
    return f"{mode}, with noise"


def by_blocks(mode: str) -> str:
    """Return the title of the device's pass by blocks."""
    return f"{mode}, by blocks"


def passes(setting: Setting) -> tuple[Pass, ...]:
    """Return the passes that a worker makes in this stage, in their order.

    A pass from end to end takes about as long as one by blocks.
    """
    return tuple(_passes(setting))


def _passes(setting: Setting) -> Iterator[Pass]:
    shape = setting.shape
    modes = [ADAPTER_OFF] if setting.case.adapter is None else [ADAPTER_ON, ADAPTER_OFF]
    if shape.layers:
        modes.append(ADAPTER_MERGED)
    # of a large model, blocks are compared in one mode
    is_small = shape.matrix_elements <= setting.case.plan.float64_merges
    block_modes = modes if is_small else modes[:1]
    yield from (Pass(title=whole(mode)) for mode in modes)
    if setting.makes_reference:
        for mode in modes:
            if mode != ADAPTER_MERGED:  # its exact values are those of the adapter on
                yield Pass(title=exact(mode), blocks=shape.blocks, weight=2.0)
            if mode in block_modes:
                yield Pass(title=noise(mode), count=LEAST_PASSES, blocks=shape.blocks)
    if setting.long_tokens and setting.makes_reference:
        yield Pass(title=LONG_TEXT)
    yield from (Pass(title=by_blocks(mode), blocks=shape.blocks) for mode in block_modes)
    if setting.makes_reference and ADAPTER_MERGED in modes and len(block_modes) > 1:
        yield Pass(title=MERGING, count=4)
