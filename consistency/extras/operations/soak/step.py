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

LARGEST_SIDE = 8192
"""The longest side of the matrices that a device multiplies for `--load`."""

SHARE = 32
"""The three matrices may take one part in so many of the free memory, so that the load takes none from the soak."""


def soak(stages: Sequence[StageEstimate], case: Case, worker: PlannedWorker) -> StageEstimate | None:
    """Return what repeating stages takes: their peaks, and the products of a load beside them."""
    repeated = [stage for stage in stages if stage.stage in SPECS and SPECS[Stage(stage.stage)].again]
    if not repeated:
        return None
    load_bytes, of_device = load_memory(worker) if case.load else (0, 0)
    return StageEstimate(
        stage=STEP,
        host_private_bytes=max(stage.host_private_bytes for stage in repeated) + load_bytes,
        host_mapped_bytes=max(stage.host_mapped_bytes for stage in repeated),
        device_bytes=max(stage.device_bytes or 0 for stage in repeated) + of_device if worker.on_device else None,
        scratch_bytes=max(stage.scratch_bytes for stage in repeated),
    )


def load_memory(worker: PlannedWorker) -> tuple[int, int]:
    """Return what the products of `--load` take of the host and the device, at most."""
    if not worker.on_device:
        return CPU_BYTES, 0
    whole = 3 * 4 * LARGEST_SIDE**2
    of_device = whole if worker.device_memory_bytes is None else min(whole, worker.device_memory_bytes // SHARE)
    return 2 * of_device // 3 + of_device * worker.takes_from_host, of_device


FINAL_STEP = FinalStep(
    name=STEP,
    is_asked=lambda case: case.soak_s is not None,
    seconds=lambda case: case.soak_s or 0.0,
    run="consistency.extras.operations.soak.soaking:soak",
    estimate="consistency.extras.operations.soak.step:soak",
)
