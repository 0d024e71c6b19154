"""The memory that the stage `shards` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting
from consistency.extras.training.replicas.cost import replicas


def shards(s: Setting) -> Cost:
    """Load the model once more for each order of adapter and sharding, and train each as `replicas` does."""
    one_training = replicas(s)
    host_model_bytes = 0 if s.on_device else s.shape.loaded_bytes
    return Cost(
        host_bytes=one_training.host_bytes + host_model_bytes,
        device_bytes=one_training.device_bytes + s.shape.loaded_bytes,
        scratch_bytes=2 * one_training.scratch_bytes,
    )
