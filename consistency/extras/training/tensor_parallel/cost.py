"""The memory that the stage `tensor-parallel` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting, forward, gradient


def tensor_parallel(s: Setting) -> Cost:
    """Load a part of the model once more, and run it forward and backward over the batch."""
    forward_pass, backward_pass = forward(s), gradient(s)
    host_model_bytes = 0 if s.on_device else s.shape.loaded_bytes
    return Cost(
        host_bytes=max(forward_pass.host_bytes, backward_pass.host_bytes) + host_model_bytes,
        device_bytes=max(forward_pass.device_bytes, backward_pass.device_bytes) + s.shape.loaded_bytes,
        scratch_bytes=backward_pass.scratch_bytes,
    )
