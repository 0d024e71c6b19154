"""Plant faults of a worker's process: it is changed, hung, stopped or killed in the middle of its run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, instead


def _at_merged(act: Callable[[], None]) -> Install:
    """Act in the middle of the run."""

    @instead("consistency.stages.merged.worker:run")
    def run(real: Callable[..., None], context: Any) -> None:
        act()
        real(context)

    return run


@_at_merged
def flip_setting() -> None:
    torch.set_float32_matmul_precision("medium")


@_at_merged
def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@_at_merged
def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@_at_merged
def hang() -> None:
    while True:
        time.sleep(1)


@_at_merged
def take_all_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)
