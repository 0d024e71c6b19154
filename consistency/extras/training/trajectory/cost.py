"""The memory that the stage `trajectory` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting, gradient

STEPS = 20
"""Number of steps without the option `--steps`."""


def trajectory(s: Setting) -> Cost:
    """Train some steps alone, and compute each step's gradients by blocks; for the reference as further trainings too.

    Gradients and parameters of each step are in files, and all trained tensors at once are in memory: with the
    optimizer's two moments, in float64 and as often as noise is drawn. The results that all workers share are in a
    file for each step.
    """
    steps, trained = s.case.steps or STEPS, s.shape.trained_elements
    one_step = gradient(s)
    host_bytes = one_step.host_bytes + 8 * trained
    kept_bytes = 0
    if s.makes_reference:
        host_bytes += 3 * 8 * trained  # parameters and two moments, in float64
        kept_bytes = steps * (8 * trained + one_step.kept_bytes)
        if s.on_device:
            host_bytes += s.shape.loaded_bytes  # the model once more, on the CPU
    return Cost(
        host_bytes=host_bytes,
        device_bytes=one_step.device_bytes + 4 * 4 * trained,
        scratch_bytes=one_step.scratch_bytes + 2 * 4 * steps * trained,
        kept_bytes=kept_bytes,
    )
