"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_TRAINING = "consistency.extras.training"

PLUGIN = Plugin(
    name="training",
    stages=tuple(
        f"{_TRAINING}.{stage}.spec:SPEC"
        for stage in ("trajectory", "collectives", "replicas", "shards", "tensor_parallel")
    ),
)
