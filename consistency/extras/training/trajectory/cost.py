"""The memory that the stage `trajectory` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting, gradient

STEPS = 20
"""Where `--steps` does not say how many."""


def trajectory(s: Setting) -> Cost:
    """Train some steps alone, and compute the gradients of each by blocks; for the reference as further trainings too.

    Gradients and parameters of each step are in files, and all trained tensors at once are in memory: with the
    optimizer's two moments, in float64 and as often as noise is drawn. What each step gives to all is in a file.
    """
    steps, trained = s.case.steps or STEPS, s.shape.trained_elements
    once = gradient(s)
    twin = s.shape.loaded_bytes if s.on_device and s.makes_reference else 0
    return Cost(
        host_bytes=once.host_bytes + twin + trained * (8 + (3 * 8 if s.makes_reference else 0)),
        device_bytes=once.device_bytes + 4 * 4 * trained,
        scratch_bytes=once.scratch_bytes + 2 * 4 * steps * trained,
        kept_bytes=steps * (8 * trained + once.kept_bytes) if s.makes_reference else 0,
    )
