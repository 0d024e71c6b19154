"""The memory that the stage `replicas` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting, of_one_token
from consistency.extras.training.sizes import STEPS


def replicas(s: Setting) -> Cost:
    """Train a few steps: gradients and parameters of each step are in files, one of each rank."""
    states = s.of_a_step * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + 3 * (s.shape.vocabulary or 0))
    native = (states + s.of_a_step * s.shape.blocks * of_one_token(s)) * s.shape.width
    optimizer = 4 * 4 * s.shape.trained_elements
    return Cost(
        host_bytes=optimizer + (0 if s.on_device else native),
        device_bytes=native + optimizer,
        scratch_bytes=3 * 4 * s.shape.trained_elements * STEPS,
    )
