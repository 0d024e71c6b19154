"""Cases of workers, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from consistency.capture.writer import CaptureWriter
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.stage import Stage
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.launch.assignment import Assignment
from consistency.launch.open_case import OpenCase
from consistency.launch.plan import WorkerPlan
from consistency.launch.scheduler import CaseTask


def assigned(case: Case, plans: Sequence[WorkerPlan], writer: CaptureWriter) -> list[Assignment]:
    """Return what each worker of a case has to do; the folder of the capture is its scratch folder too."""
    task = CaseTask(case=case, waves=[plans], target=writer.target)
    open_case = OpenCase(number=0, task=task, writer=writer, scratch=writer.folder)
    return [Assignment(open_case=open_case, plan=plan) for plan in plans]


def on_devices(writer: CaptureWriter, stage: Stage, *names: str) -> list[Assignment]:
    """Return what workers on these devices have to do in a case of one stage."""
    infos = [DeviceInfo(spec=parse_device(name), architecture="a", model="m") for name in names]
    plans = [WorkerPlan(info=info, load_path=LoadPath.ISOLATED) for info in infos]
    return assigned(Case(name="x", base="base", stages=(stage,)), plans, writer)
