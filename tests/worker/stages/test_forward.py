"""Stage `forward`: what a row is of, and what is said of outputs from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from consistency.case.tolerance import Override
from consistency.worker.stages import forward
from consistency.worker.stages.forward import NOT_JUDGED, outputs_of
from tests.worker.conftest import Look
from tests.worker.model.made_models import on_llama

END = "adapter_on.end_to_end"


@pytest.fixture
def adapter(llama: Path) -> Path:
    return on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


def test_every_result_is_judged_once_and_the_outputs_from_end_to_end_are_shown(
    llama: Path, look: Look, adapter: Path
) -> None:
    found = [r for r in look(llama, adapter, stages=("forward",)) if r.stage == "forward"]
    assert len({r.key for r in found}) == len(found)
    ends = [r for r in found if r.tensor.endswith(".end_to_end")]
    assert {r.reason for r in ends} == {NOT_JUDGED}
    assert {r.evidence["positions"] for r in ends} == {8 * 16}
    for record in found:
        if record not in ends and record.rule == "block":
            assert record.measure is not None
            assert record.measure.ratio is not None
            assert record.rounding is not None


def test_a_tolerance_judges_the_outputs_from_end_to_end(llama: Path, look: Look, adapter: Path) -> None:
    given = (Override(stage="forward", layer="logits", atol=0.0, rtol=0.0),)
    (end,) = (r for r in look(llama, adapter, stages=("forward",), tolerance=given) if r.tensor == END)
    assert (end.rule, end.status, end.reason) == ("user", "outside", None)


def test_outputs_that_are_nan_where_float64_is_not_are_not_within(
    llama: Path, look: Look, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that overflows in float16 from end to end."""

    def overflown(*given: Any) -> dict[str, torch.Tensor]:
        found = outputs_of(*given)
        return {name: one if one.dtype == torch.float64 else one * torch.nan for name, one in found.items()}

    monkeypatch.setattr(forward, "outputs_of", overflown)
    (end,) = (r for r in look(llama, adapter, stages=("forward",)) if r.tensor == END)
    assert end.status == "measured"
