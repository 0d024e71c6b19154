"""Cases of workers, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.stage import Stage
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.launch.assignment import Assignment
from consistency.launch.plan import WorkerPlan


def assigned(home: Path, name: str, *, stages: Sequence[Stage] = (COLLECTIVES,)) -> Assignment:
    """Return what a worker on a device has to do."""
    info = DeviceInfo(spec=parse_device(name), architecture="a", model="m")
    plan = WorkerPlan(info=info, load_path=LoadPath.ISOLATED)
    case = Case(name="x", base="base", stages=tuple(stages))
    folder = home / plan.slug
    folder.mkdir(exist_ok=True)
    return Assignment(number=0, case=case, plan=plan, folder=folder, blobs=home, scratch=home, fault=None)
