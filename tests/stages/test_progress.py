"""The progress of a stage: every pass is one that it declares, and the share that is done only grows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from consistency.case import standard
from consistency.case.budget.costs import Setting
from consistency.case.budget.passes import passes_of
from consistency.case.budget.shape import read_shape
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.case.stage import Level, Stage
from consistency.case.stages import SPECS
from consistency.worker.protocol import Event
from tests.worker.conftest import Look

LLAMA = builtin_folder("llama")
DECLARING = [stage for stage, spec in SPECS.items() if spec.passes]


@pytest.mark.parametrize("stage", DECLARING)
def test_each_step_of_a_pass_has_its_share_and_none_goes_back(look: Look, told: list[Event], stage: Stage) -> None:
    look(LLAMA / "base", LLAMA / "adapter", stages=(stage,), level=Level.STANDARD, steps=3)
    of_stage = [event for event in told if event.kind == "step" and event.stage == stage]
    shares = [event.share for event in of_stage if event.share is not None]
    assert [event.layer for event in of_stage if event.share is None and not event.blocks] == []
    assert len(shares) > 3
    assert all(after >= before for before, after in pairwise(shares)), shares
    assert (shares[0], shares[-1] > 0.7) == (0.0, True)


@pytest.mark.parametrize("stage", DECLARING)
def test_who_makes_no_reference_has_fewer_passes(stage: Stage) -> None:
    case = Case(name="llama", base=str(LLAMA / "base"), adapter=str(LLAMA / "adapter"), stages=(stage,))
    shape = read_shape(case)
    own, with_reference = (
        sum(
            one.count
            for one in passes_of(stage, Setting(shape=shape, case=case, on_device=True, makes_reference=makes))
        )
        for makes in (False, True)
    )
    assert 0 < own < with_reference


def test_passes_go_over_the_blocks_of_the_model() -> None:
    case = Case(name="llama", base=str(LLAMA / "base"), adapter=None, stages=(standard.FORWARD,))
    setting = Setting(shape=read_shape(case), case=case, on_device=False, makes_reference=True)
    assert {one.blocks for one in passes_of(standard.FORWARD, setting)} == {0, 4}
    assert not passes_of(standard.BASE, setting)
