"""Stage `forward`: what a row is of, and what is said of outputs from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.case.tolerance import Override
from consistency.stages.forward import reference
from consistency.stages.forward import worker as forward
from consistency.stages.forward.worker import NOT_JUDGED
from consistency.worker.model.running import activations
from consistency.worker.protocol import Event
from tests.worker.conftest import Look
from tests.worker.model.made_models import a_llama, on_llama, saved

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


def test_every_pass_by_blocks_tells_in_which_block_it_is(tmp_path: Path, look: Look, told: list[Event]) -> None:
    base = saved(a_llama(num_hidden_layers=3), tmp_path / "three")
    adapter = on_llama(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    look(base, adapter, stages=("forward",))
    passes: dict[str, list[int]] = {}
    for event in told:
        if event.blocks:
            assert event.blocks == 3
            passes.setdefault(event.layer, []).append(event.block)
    modes = ("adapter_on", "adapter_off", "adapter_merged")
    assert {f"{mode}, by blocks" for mode in modes} | {"adapter_on, float64", "with noise, float32"} <= passes.keys()
    for blocks in passes.values():
        assert blocks == [1, 2, 3] * (len(blocks) // 3)


def test_a_tolerance_judges_the_outputs_from_end_to_end(llama: Path, look: Look, adapter: Path) -> None:
    given = (Override(stage="forward", layer="logits", atol=0.0, rtol=0.0),)
    (end,) = (r for r in look(llama, adapter, stages=("forward",), tolerance=given) if r.tensor == END)
    assert (end.rule, end.status, end.reason) == ("user", "outside", None)


def test_outputs_that_are_nan_where_float64_is_not_are_not_within(
    llama: Path, look: Look, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that overflows in float16 from end to end."""

    def overflown(*given: Any) -> dict[str, torch.Tensor]:
        found = activations(*given)
        return {name: one if one.dtype == torch.float64 else one * torch.nan for name, one in found.items()}

    monkeypatch.setattr(forward, "activations", overflown)
    (end,) = (r for r in look(llama, adapter, stages=("forward",)) if r.tensor == END)
    assert end.status == "measured"


def test_of_a_large_model_one_sequence_shows_how_far_the_outputs_are(
    llama: Path, look: Look, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forward, reference):
        monkeypatch.setattr(module, "block_modes", lambda *_: ["adapter_on"])
    found = [r for r in look(llama, adapter, stages=("forward",)) if r.stage == "forward"]
    ends = {r.tensor: r for r in found if r.tensor.endswith(".end_to_end")}
    assert {r.evidence["positions"] for r in ends.values()} == {16}
    assert set(ends) == {f"{mode}.end_to_end" for mode in ("adapter_on", "adapter_off", "adapter_merged")}
    assert {r.tensor.partition(".")[0] for r in found if r.tensor not in ends} == {"adapter_on"}


def test_what_overflows_in_half_precision_is_skipped_and_says_so(tmp_path: Path, look: Look) -> None:
    base = saved(a_llama(), tmp_path / "large")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for projection in (model.model.layers[0].mlp.down_proj, model.model.layers[0].mlp.up_proj):
            projection.weight.mul_(1e4)
    model.save_pretrained(base)
    adapted = on_llama(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found = [r for r in look(base, adapted, dtype="float16", stages=("forward",)) if r.stage == "forward"]
    said = {(r.layer, r.status) for r in found if r.reason is not None and "are NaN or infinite too" in r.reason}
    assert ("model.layers.0.mlp", "skipped") in said
    assert not [r for r in found if r.status == "outside"]
