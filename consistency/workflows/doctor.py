"""`consistency doctor`: a run of the stages that need no model; the advice comes from its comparison."""

from __future__ import annotations

import dataclasses

import msgspec

from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.case.stages import MODEL_LESS, SPECS
from consistency.launch.plan import default_load_paths
from consistency.workflows.pipeline import Plan, plan_of

_STAGES = tuple(stage for stage in MODEL_LESS if SPECS[stage].levels)
"""Those that some level runs: the others are for who asks for them."""


def doctor_plan(options: Options) -> Plan:
    """Return the plan of a run of the stages of a level that need no model, at the level and on the devices given.

    Several accelerators are visible to one another, in one wave: alone with its device a worker sees no pair.
    """
    plan = plan_of(Case(name="doctor", base="", stages=_STAGES, level=options.level), options)
    if LoadPath.SHARED not in default_load_paths(plan.devices):
        return plan
    return dataclasses.replace(plan, case=msgspec.structs.replace(plan.case, load_paths=(LoadPath.SHARED,)))
