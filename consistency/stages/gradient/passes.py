"""The passes of the stage `gradient`. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Setting, noisy_gradients
from consistency.case.budget.passes import Pass

EXACT, NOISE, DEVICE, STEPS = "backward, float64", "with noise", "backward, by blocks", "the optimizer's step"


def passes(setting: Setting) -> tuple[Pass, ...]:
    """Return what a worker makes; the steps of the optimizer take about as long as one."""
    shape, case = setting.shape, setting.case
    noisy = noisy_gradients(case, shape.matrix_elements)
    of_reference = (Pass(title=EXACT, blocks=shape.blocks), Pass(title=NOISE, count=noisy, blocks=shape.blocks))
    return (
        *(of_reference if setting.makes_reference else ()),
        Pass(title=DEVICE, count=case.repeat, blocks=shape.blocks),
        Pass(title=STEPS),
    )
