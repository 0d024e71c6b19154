"""What is certain of an adapter's effect, on adapters that PEFT made, and the warning that a comparison makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PromptTuningConfig, TrainableTokensConfig, get_peft_model

from consistency.capture.folder import SCHEMA, CaptureManifest
from consistency.capture.reader import read_capture
from consistency.capture.records import WorkerInfo
from consistency.capture.writer import CaptureWriter
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stages import Level, Stage
from consistency.comparison.compare import compare
from consistency.comparison.kinds import FindingKind
from consistency.worker import session
from consistency.worker.protocol import EventLog
from tests.worker.made_jobs import job_in

TARGETS = ["q_proj", "v_proj"]
STAGES = (Stage.ADAPTER, Stage.MERGED, Stage.FORWARD)
OF_WEIGHTS = (Stage.ADAPTER, Stage.MERGED)

Effect = Callable[..., tuple[str, list[str]]]


def random(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.02)


def plain(_: Any) -> None:
    """Leave the adapter as it was made."""


@pytest.fixture
def effect(tmp_path: Path) -> Effect:
    """Make an adapter, check it in this process, and return the recorded effect and the warnings."""

    def of(config: Any, change: Callable[[Any], None] = plain, stages: tuple[Stage, ...] = STAGES) -> Any:
        from transformers import AutoModelForCausalLM

        base = prepare_case(Options(base="builtin:llama")).base
        torch.manual_seed(0)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        change(model)
        model.save_pretrained(tmp_path / "adapter")
        options = Options(base=base, adapter=str(tmp_path / "adapter"), stages=stages, level=Level.QUICK)
        case = prepare_case(options)
        with CaptureWriter(tmp_path / "capture") as writer:
            job = job_in(writer, case, tmp_path)
            with EventLog(Path(job.folder, "events.jsonl")) as events:
                session.run(job, events)
            info = WorkerInfo(name="cpu", load_path="isolated", architecture="x", model="chip", status="ok")
            writer.write_worker("cpu.isolated", info)
            manifest = CaptureManifest(
                schema=SCHEMA, tool="0", created="2026-01-01", host="here", case=case, workers=("cpu.isolated",)
            )
            capture = read_capture(writer.commit(manifest))
        recorded = next(r.effect for r in capture.workers[0].records if r.tensor == "rank_and_scaling")
        found = compare([capture])
        assert found.verdict == "consistent"
        return recorded, [f.message.partition(": ")[2] for f in found.findings if f.kind == FindingKind.NO_EFFECT]

    return of


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    ("config", "change", "recorded", "text"),
    [
        (LoraConfig(target_modules=TARGETS, r=4), plain, "zero-weights", "8 of 8 lora_B tensors are zero"),
        (LoraConfig(target_modules=TARGETS, lora_alpha=0), random, "zero-scaling", "scaling of 8 of 8 layers is zero"),
        (LoHaConfig(target_modules=TARGETS, r=4), plain, "layers", "8 of 8 deltas are zero"),
    ],
    ids=["fresh LoRA", "scaling 0", "fresh LoHa"],
)  # fmt: skip
def test_an_adapter_of_nothing_is_named_by_its_weights(
    effect: Effect, config: Any, change: Callable[[Any], None], recorded: str, text: str
) -> None:
    assert effect(config, change, OF_WEIGHTS) == (recorded, [text])


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_outputs_show_what_no_closed_form_does(effect: Effect) -> None:
    recorded, (text,) = effect(IA3Config(target_modules=TARGETS, feedforward_modules=[]))
    assert recorded == "layers"
    assert text == "6 outputs with and without it are bitwise equal"


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    ("config", "recorded"),
    [
        (LoraConfig(target_modules=TARGETS, r=4), "layers"),
        (LoraConfig(target_modules=TARGETS, r=4, use_dora=True), ""),
        (LoHaConfig(target_modules=TARGETS, r=4), "layers"),
        (IA3Config(target_modules=TARGETS, feedforward_modules=[]), "layers"),
        (TrainableTokensConfig(token_indices=[1, 2]), "some-tokens"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), ""),
    ],
    ids=["LoRA", "DoRA", "LoHa", "IA3", "tokens", "prompt"],
)  # fmt: skip
def test_an_adapter_that_changes_something_is_no_warning(effect: Effect, config: Any, recorded: str) -> None:
    assert effect(config, random) == (recorded, [])


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_a_layer_that_was_saved_whole_and_trained_is_an_effect(effect: Effect) -> None:
    """The factors are zeros, but the head is not the base's."""

    def train_head(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                torch.nn.init.normal_(parameter, std=0.02)

    config = LoraConfig(target_modules=TARGETS, r=4, modules_to_save=["lm_head"])
    assert effect(config, train_head, OF_WEIGHTS) == ("", [])
