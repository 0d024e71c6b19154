"""The soak as a step after the stages, and the memory that it takes. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from consistency.case.budget.estimate import PlannedWorker, StageEstimate
from consistency.case.case import Case
from consistency.case.final_step import FinalStep
from consistency.case.stage import Stage
from consistency.case.stages import SPECS

STEP = "soak"

CPU_SIDE, CPU_BATCH = 64, 256
"""OpenBLAS computes a product of up to 2¹⁸ multiplications, 64³, on one thread (`GEMM_MULTITHREAD_THRESHOLD` 4 times
`SMP_THRESHOLD_MIN` 65536); so many of them take some milliseconds, so that the load ends soon after the soak."""

CPU_BYTES = 3 * CPU_BATCH * CPU_SIDE**2 * 4
"""Bytes of the two factors and the product of a load on the CPU, in float32."""

LARGEST_SIDE = 8192
"""The longest side of the matrices that a device multiplies for `--load`."""

FREE_PARTS = 32
"""The three matrices take at most one 32nd of a device's free memory, so that the soak lacks none."""


def soak(stages: Sequence[StageEstimate], case: Case, worker: PlannedWorker) -> StageEstimate | None:
    """Return the memory that repeating the stages takes: their peaks, and the matrices of a load beside them.

    None where no stage of the case can be repeated.
    """
    repeated = [stage for stage in stages if stage.stage in SPECS and SPECS[Stage(stage.stage)].again]
    if not repeated:
        return None
    load_host_bytes = load_device_bytes = 0
    if case.load:
        load_host_bytes, load_device_bytes = load_memory(worker)
    device_bytes: int | None = None
    if worker.on_device:
        device_bytes = max(stage.device_bytes or 0 for stage in repeated) + load_device_bytes
    return StageEstimate(
        stage=STEP,
        host_private_bytes=max(stage.host_private_bytes for stage in repeated) + load_host_bytes,
        host_mapped_bytes=max(stage.host_mapped_bytes for stage in repeated),
        device_bytes=device_bytes,
        scratch_bytes=max(stage.scratch_bytes for stage in repeated),
    )


def load_memory(worker: PlannedWorker) -> tuple[int, int]:
    """Return the most bytes that the matrices of `--load` take of the host's memory, and of the device's."""
    if not worker.on_device:
        return CPU_BYTES, 0
    device_bytes = 3 * 4 * LARGEST_SIDE**2
    if worker.device_memory_bytes is not None:
        device_bytes = min(device_bytes, worker.device_memory_bytes // FREE_PARTS)
    # the two factors are drawn on the host; a device without memory of its own has all three matrices there too
    host_bytes = 2 * device_bytes // 3 + device_bytes * worker.takes_from_host
    return host_bytes, device_bytes


FINAL_STEP = FinalStep(
    name=STEP,
    is_asked=lambda case: case.soak_s is not None,
    seconds=lambda case: case.soak_s or 0.0,
    run="consistency.extras.operations.soak.soaking:soak",
    estimate="consistency.extras.operations.soak.step:soak",
)
