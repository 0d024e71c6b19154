"""`consistency doctor`: a run of the stages that need no model; the advice comes from its comparison."""

from __future__ import annotations

from collections.abc import Sequence

from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.stages import MODEL_LESS, Level
from consistency.devices.discovery import select
from consistency.launch.plan import default_load_paths
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
    load_paths = (LoadPath.SHARED,) if LoadPath.SHARED in default_load_paths(found) else None
    case = Case(name="doctor", base="", stages=MODEL_LESS, level=level, load_paths=load_paths)
    return Plan(case=case, devices=found, limits=limits)
