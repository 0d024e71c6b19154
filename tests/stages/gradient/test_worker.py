"""Stage `gradient`: what is said of gradients of which too little is known, and of how far it is."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest

from consistency.case.budget.costs import MOST_PASSES
from consistency.worker.judging import gradients
from consistency.worker.judging.block_rule import ZEROS_PASS
from consistency.worker.protocol import Event
from tests.worker.conftest import Look
from tests.worker.model.made_models import a_llama, on_llama, saved


def test_where_zeros_would_pass_a_gradient_is_skipped(llama: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = on_llama(llama, peft.LoraConfig(r=1, target_modules=["q_proj", "v_proj", "down_proj"]))

    def reasons() -> list[str | None]:
        found = look(llama, adapter, dtype="bfloat16", stages=("gradient",))
        assert {r.status for r in found} <= {"within", "equal", "skipped", "measured"}
        return [r.reason for r in found if r.status == "skipped"]

    assert reasons() == []
    monkeypatch.setattr(gradients, "passes_for_sums", lambda *_: 2)
    assert set(reasons()) == {ZEROS_PASS}


def test_every_pass_tells_its_blocks_and_the_share_of_the_stage(tmp_path: Path, look: Look, told: list[Event]) -> None:
    base = saved(a_llama(num_hidden_layers=3), tmp_path / "three")
    adapter = on_llama(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    look(base, adapter, stages=("gradient",), repeat=2)
    steps = [event for event in told if event.stage == "gradient" and event.kind == "step"]
    blocks_of_passes: dict[tuple[str, int], list[int]] = {}
    for event in steps:
        if event.blocks:
            assert event.blocks == 3
            blocks_of_passes.setdefault((event.layer, event.done), []).append(event.block)
    assert blocks_of_passes == {
        ("backward, float64", 0): [1, 2, 3, 3, 2, 1],
        **{("with noise, float32", seed): [1, 2, 3] for seed in range(MOST_PASSES)},
        **{("backward, by blocks", repeat): [1, 2, 3] for repeat in range(2)},
    }
    shares = [event.share for event in steps if event.share is not None]
    assert len(shares) == len(steps)
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.9 < shares[-1] < 1
