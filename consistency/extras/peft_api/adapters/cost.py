"""The memory that the stage `adapters` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting
from consistency.case.stage import Level

CUT_STEPS = 1 << 31
"""Steps of the decompositions of one type of combination but at level thorough: the longer side of a delta squared, as
PEFT asks for full matrices, times the shorter one."""

CUT_ELEMENTS = 1 << 24
"""Elements of the largest delta that is cut: some ten float64 arrays of them are held, 128 MiB each."""


def adapters(s: Setting) -> Cost:
    """Load every adapter alone and then all of them, run each, combine them, and merge them ten times by layer.

    A further adapter is taken to be as large as the first. The exact value of a merged weight is made piece by piece;
    the drift takes the weight before, after and in float64 by parts. Of five types of combinations the deltas are cut,
    in the first layers but at level thorough: a square matrix of n elements takes n to the power of 1.5 steps, and some
    ten float64 arrays.
    """
    count = len(s.case.adapters)
    rows = s.positions
    states = rows * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + (s.shape.vocabulary or 0))
    of_layer = s.shape.largest_layer_elements * (4 * s.shape.width + (count + 1) * 4)
    cut = [layer.elements for layer in s.shape.layers if layer.rank and layer.elements <= CUT_ELEMENTS]
    if s.case.level is not Level.THOROUGH:
        cut = [elements for elements in cut if elements**1.5 <= CUT_STEPS]
    return Cost(
        host_bytes=max(of_layer, states * s.shape.width, 80 * max(cut, default=0)) + 4 * count * s.shape.adapter_bytes,
        device_bytes=max(of_layer, states * s.shape.width) + 4 * count * s.shape.adapter_bytes,
    )
