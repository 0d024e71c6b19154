"""A large model's passes with noise are fewer."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest

from consistency.case import stages
from consistency.case.stage import Level
from tests.worker.conftest import Look
from tests.worker.model.made_models import on_llama


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_model_is_judged_by_fewer_passes(
    look: Look, llama: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = on_llama(llama, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))

    def figures() -> dict[tuple[str, str, str], tuple[float, int, int]]:
        records = look(llama, adapter, stages=("gradient",), dtype=dtype, level=Level.QUICK)
        assert not [r for r in records if r.status in ("outside", "blocked", "skipped")]
        return {
            (r.stage, r.layer, r.tensor): (float(r.rounding.largest), r.rounding.samples, r.rounding.drawn)
            for r in records
            if r.rounding is not None
        }

    small = figures()
    monkeypatch.setattr(stages, "_LARGE", 1)
    large = figures()
    assert small.keys() == large.keys()
    for key, (error, samples, drawn) in large.items():
        usual, of_device, of_all = small[key]
        assert drawn < of_all, "fewer passes"
        assert samples == of_device
        if usual:
            assert usual / 6 < error < usual * 6, key
