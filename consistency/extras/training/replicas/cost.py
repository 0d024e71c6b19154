"""The memory that the stage `replicas` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting, of_one_token
from consistency.extras.training.sizes import STEPS


def replicas(s: Setting) -> Cost:
    """Train a few steps: gradients and parameters of each step are in files, one per rank."""
    shape = s.shape
    # the hidden states between blocks, and three tensors of the size of the logits
    states = s.of_a_step * ((shape.blocks + 1) * (shape.hidden or 0) + 3 * (shape.vocabulary or 0))
    activation_bytes = (states + s.of_a_step * shape.blocks * of_one_token(s)) * shape.width
    optimizer_bytes = 4 * 4 * shape.trained_elements
    host_bytes = optimizer_bytes if s.on_device else optimizer_bytes + activation_bytes
    return Cost(
        host_bytes=host_bytes,
        device_bytes=activation_bytes + optimizer_bytes,
        scratch_bytes=3 * 4 * shape.trained_elements * STEPS,
    )
