"""An adapter whose loading draws random numbers is told by two seeds; one that only computes is not."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import transformers

from consistency.capture.adapter_remarks import AdapterFlaw, remarks_in
from consistency.capture.names import RANK_AND_SCALING
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged
from consistency.worker.model.drawn_on_loading import remark_on_draws
from tests.extras.merging.check_merged.made_merges import kinds
from tests.worker.conftest import Look
from tests.worker.model.made_models import adapter_on, case_of


def draws() -> peft.PeftConfig:
    return peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa_niter_1")


def made(llama: Path, config: peft.PeftConfig, folder: Path) -> Path:
    return adapter_on(transformers.LlamaForCausalLM.from_pretrained(llama), config, folder)


def test_a_draw_is_found_and_its_weights_are_named(llama: Path, tmp_path: Path) -> None:
    remark = remark_on_draws(case_of(llama, made(llama, draws(), tmp_path / "adapter")))
    assert remark is not None
    assert (remark.flaw, remark.severity) == (AdapterFlaw.DRAWN_ON_LOADING, "error")
    assert "another adapter on every load" in remark.text
    assert "layers.0.self_attn.q_proj.weight" in remark.text


@pytest.mark.parametrize("name", ["pissa", "vera", "lora"])
@pytest.mark.filterwarnings("ignore:Specified to not")
def test_what_is_computed_without_a_draw_is_the_same(llama: Path, tmp_path: Path, name: str) -> None:
    """PiSSA decomposes the base, and VeRA draws its projections from a seed that its config has."""
    configs = {
        "pissa": peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"),
        "vera": peft.VeraConfig(r=4, target_modules=["q_proj"], save_projection=False),
        "lora": peft.LoraConfig(r=2, target_modules=["q_proj"]),
    }
    assert remark_on_draws(case_of(llama, made(llama, configs[name], tmp_path / "adapter"))) is None


def test_a_run_records_it(llama: Path, tmp_path: Path, look: Look) -> None:
    rows = look(llama, made(llama, draws(), tmp_path / "adapter"), stages=("adapter",))
    (settings,) = (row for row in rows if row.tensor == RANK_AND_SCALING)
    assert [remark.flaw for remark in remarks_in(settings.evidence)] == [AdapterFlaw.DRAWN_ON_LOADING]


def test_a_base_that_does_not_fit_twice_is_not_loaded_again(
    llama: Path, tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consistency.stages.adapter.worker.available_bytes", lambda: 1)
    rows = look(llama, made(llama, draws(), tmp_path / "adapter"), stages=("adapter",))
    (row,) = (row for row in rows if row.tensor == "another_seed")
    assert row.status == "skipped"
    assert "a second base takes" in (row.reason or "")
    assert not any(remarks_in(row.evidence) for row in rows)


def test_a_merge_of_it_is_judged_by_no_load(llama: Path, tmp_path: Path) -> None:
    """The same on every call, and no figures of one load among many."""
    adapter = made(llama, draws(), tmp_path / "adapter")
    base = transformers.LlamaForCausalLM.from_pretrained(llama)
    peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(tmp_path / "merged")
    first, second = (check_merged(tmp_path / "merged", base=llama, adapter=adapter) for _ in range(2))
    assert kinds(first) == [AdapterFlaw.DRAWN_ON_LOADING]
    assert [finding.message for finding in first.findings] == [finding.message for finding in second.findings]
    assert first.verdict == "inconsistent"
    assert MergeCause.OFF not in kinds(second)
