"""The passes of the stage `gradient`. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Setting, noisy_gradients
from consistency.case.budget.passes import Pass

EXACT, NOISE, DEVICE, STEPS = "backward, float64", "with noise", "backward, by blocks", "the optimizer's step"


def passes(setting: Setting) -> tuple[Pass, ...]:
    """Return the passes that a worker makes in this stage, in their order."""
    shape, case = setting.shape, setting.case
    of_device = (
        Pass(title=DEVICE, count=case.repeat, blocks=shape.blocks),
        Pass(title=STEPS),  # all steps of the optimizer together take about as long as one pass
    )
    if not setting.makes_reference:
        return of_device
    noisy = noisy_gradients(case, shape.matrix_elements)
    of_reference = (
        Pass(title=EXACT, blocks=shape.blocks),
        Pass(title=NOISE, count=noisy, blocks=shape.blocks),
    )
    return (*of_reference, *of_device)
