"""Planted faults of the worker's process. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault

_PLANTED = "consistency.worker.faults.process"
_STAGES = (standard.MERGED,)

ROWS: tuple[Fault, ...] = (
    Fault(name="setting-flipped", plant=f"{_PLANTED}:flip_setting", expected="setting-changed", stages=_STAGES),
    Fault(name="killed", plant=f"{_PLANTED}:kill", expected="lost-worker", stages=_STAGES, words="SIGKILL"),
    Fault(name="hung", plant=f"{_PLANTED}:hang", expected="lost-worker", stages=_STAGES, words="no sign of life"),
    Fault(name="stopped", plant=f"{_PLANTED}:stop", expected="lost-worker", stages=_STAGES, words="no sign of life"),
    Fault(
        name="out-of-memory", plant=f"{_PLANTED}:take_all_memory", expected="lost-worker", stages=_STAGES,
        words="out of memory",
    ),
)  # fmt: skip
