"""The memory that the stage `tensor-parallel` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting, forward, gradient


def tensor_parallel(s: Setting) -> Cost:
    """Load a part of the model once more, and run it forward and backward over the batch."""
    once, backward = forward(s), gradient(s)
    return Cost(
        host_bytes=max(once.host_bytes, backward.host_bytes) + (0 if s.on_device else s.shape.loaded_bytes),
        device_bytes=max(once.device_bytes, backward.device_bytes) + s.shape.loaded_bytes,
        scratch_bytes=backward.scratch_bytes,
    )
