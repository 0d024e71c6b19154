"""Planted faults of the stage `transfer`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault

_PLANTED = "consistency.stages.transfer.planted"
_STAGES = (standard.TRANSFER,)

ROWS: tuple[Fault, ...] = (
    Fault(name="transfer-dropped", plant=f"{_PLANTED}:dropped", expected="never-written", stages=_STAGES, case="C1"),
    Fault(name="transfer-zeros", plant=f"{_PLANTED}:zeros", expected="zeros", stages=_STAGES, case="C1"),
    Fault(name="transfer-corrupt", plant=f"{_PLANTED}:corrupt", expected="bit-flip", stages=_STAGES, case="C1"),
    Fault(
        name="transfer-stale-beside-work", plant=f"{_PLANTED}:stale_under_load", expected="stale", stages=_STAGES,
        case="C1", words="only under load",
    ),
)  # fmt: skip
