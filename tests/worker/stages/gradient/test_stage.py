"""Stage `gradient`: what is said of gradients of which too little is known."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest

from consistency.worker.stages import gradients
from consistency.worker.stages.block_rule import ZEROS_PASS
from tests.worker.conftest import Look
from tests.worker.model.made_models import on_llama


def test_where_zeros_would_pass_a_gradient_is_skipped(llama: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = on_llama(llama, peft.LoraConfig(r=1, target_modules=["q_proj", "v_proj", "down_proj"]))

    def reasons() -> list[str | None]:
        found = look(llama, adapter, dtype="bfloat16", stages=("gradient",))
        assert {r.status for r in found} <= {"within", "equal", "skipped", "measured"}
        return [r.reason for r in found if r.status == "skipped"]

    assert reasons() == []
    monkeypatch.setattr(gradients, "passes_for_sums", lambda *_: 2)
    assert set(reasons()) == {ZEROS_PASS}
