"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_TRAINING = "consistency.extras.training"
_STAGES = ("trajectory", "collectives", "replicas", "shards", "tensor_parallel")

PLUGIN = Plugin(
    name="training",
    options=("steps",),
    stages=tuple(f"{_TRAINING}.{stage}.spec:SPEC" for stage in _STAGES),
    faults=tuple(f"{_TRAINING}.{stage}.faults:ROWS" for stage in _STAGES),
    kinds=(f"{_TRAINING}.kinds:KINDS",),
    finders=(
        f"{_TRAINING}.findings:RANKS",
        f"{_TRAINING}.tensor_parallel.findings:HEALTHY_SPLITS",
        f"{_TRAINING}.collectives.findings:SUMS_AGAIN",
        f"{_TRAINING}.trajectory.findings:TRAJECTORIES",
    ),
    sections=(f"{_TRAINING}.trajectory.page:SECTION",),
)
