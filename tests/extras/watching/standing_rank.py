"""One rank of a training that stands still, as a process: `python -m … FOLDER RANK WORLD FAULT ON_FINDING`."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from consistency.extras.watching import standstill
from tests.extras.watching.trainings import Training

WRONG_RANK, WRONG_STEP = 1, 3
TIMEOUT_S = 4.0


def killed(step: int, training: Training) -> None:
    if (step, training.rank) == (WRONG_STEP, WRONG_RANK):
        os.kill(os.getpid(), signal.SIGKILL)


def stopped(step: int, training: Training) -> None:
    if (step, training.rank) == (WRONG_STEP, WRONG_RANK):
        os.kill(os.getpid(), signal.SIGSTOP)


def slow_storage(step: int, training: Training) -> None:
    if (step, training.rank) == (WRONG_STEP, WRONG_RANK):
        time.sleep(600)


def late_speaker(step: int, training: Training) -> None:
    """Stand still, and have the rank that is to say so take longer than the others to conclude it."""
    if training.rank == 0:
        standstill._GONE_BEATS = 12
    slow_storage(step, training)


def slow_step(step: int, training: Training) -> None:
    """Take time, and less of it than a step may take."""
    if (step, training.rank) == (WRONG_STEP, WRONG_RANK):
        time.sleep(TIMEOUT_S / 4)


def main() -> None:
    folder, rank, world, fault, on_finding = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=60),
    )
    training = Training(
        rank=int(rank), world=int(world), every=50, on_finding=on_finding, options={"timeout_s": TIMEOUT_S}
    )
    findings = training.run(Path(folder) / "watch", globals()[fault])
    print(f"done with {len(findings)} findings")


if __name__ == "__main__":
    main()
