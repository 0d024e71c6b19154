"""`consistency doctor`: a run of the stages that need no model; the advice comes from its comparison."""

from __future__ import annotations

from collections.abc import Sequence

from consistency.case.load_path import Road
from consistency.case.options import Case
from consistency.case.stages import MODEL_LESS, Level
from consistency.devices.discovery import select
from consistency.launch.plan import default_roads
from consistency.launch.process import Limits
from consistency.workflows.pipeline import Plan


def doctor_plan(devices: Sequence[str], *, limits: Limits, level: Level = Level.STANDARD) -> Plan:
    """Return the plan of a run of every stage that needs no model.

    Several accelerators see one another, in one wave: alone with its device a worker sees no pair.

    Raises
    ------
    UsageError
        A device that this machine does not have.
    """
    found = select(devices)
    roads = (Road.SHARED,) if Road.SHARED in default_roads(found) else None
    case = Case(name="doctor", base="", stages=MODEL_LESS, level=level, roads=roads)
    return Plan(case=case, devices=found, limits=limits)
