"""Faults of the process: settings changed behind its back, killed, hung, stopped, out of memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, replace


def _at_merged(act: Callable[[], None]) -> Install:
    """Do something in the middle of the run."""

    def wrap(real: Callable[..., Any]) -> Callable[..., None]:
        def run(context: Any) -> None:
            act()
            real(context)

        return run

    def install() -> Undo:
        from consistency.worker.stages.merged import stage as merged

        return replace(merged, "run", wrap)

    return install


def _hang() -> None:
    while True:
        time.sleep(1)


def _out_of_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


FAULTS: dict[str, Install] = {
    "setting-flipped": _at_merged(lambda: torch.set_float32_matmul_precision("medium")),
    "killed": _at_merged(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "hung": _at_merged(_hang),
    "stopped": _at_merged(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "out-of-memory": _at_merged(_out_of_memory),
}
