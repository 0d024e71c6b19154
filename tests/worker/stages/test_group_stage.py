"""What the stages of a group have in common."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from consistency.case.case import Case
from consistency.case.stages import Stage
from consistency.worker.stages.group_stage import float64_of


@pytest.mark.parametrize("stage", [Stage.FORWARD, Stage.GRADIENT])
def test_results_of_a_stage_that_is_not_run_are_not_waited_for(tmp_path: Path, stage: Stage) -> None:
    """`--only` and bisect run a stage without the others: nobody would ever write its results."""
    case = Case(name="one", base="", stages=(Stage.TENSOR_PARALLEL,))
    context = SimpleNamespace(job=SimpleNamespace(case=case), scratch=tmp_path, events=None)
    found = float64_of(cast("Any", context), stage)
    assert found == f"the stage {stage}, whose float64 results judge it, is not run"
