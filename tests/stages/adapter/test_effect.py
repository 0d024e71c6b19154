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
from consistency.case import standard
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stage import Level, Stage
from consistency.comparison import kinds
from consistency.comparison.compare import compare
from consistency.worker import session
from consistency.worker.protocol import EventLog
from tests.worker.made_jobs import job_in

TARGETS = ["q_proj", "v_proj"]
STAGES = (standard.ADAPTER, standard.MERGED, standard.FORWARD)
OF_WEIGHTS = (standard.ADAPTER, standard.MERGED)

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
        return recorded, [f.message.partition(": ")[2] for f in found.findings if f.kind == kinds.NO_EFFECT]

    return of


def train_head(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.02)


LORA = LoraConfig(target_modules=TARGETS, r=4)
LOHA = LoHaConfig(target_modules=TARGETS, r=4)
IA3 = IA3Config(target_modules=TARGETS, feedforward_modules=[])
CASES = {
    "a fresh LoRA": (LORA, plain, OF_WEIGHTS, "zero-weights", "8 of 8 lora_B tensors are zero"),
    "a scaling of 0": (
        LoraConfig(target_modules=TARGETS, lora_alpha=0), random, OF_WEIGHTS,
        "zero-scaling", "scaling of 8 of 8 layers is zero",
    ),
    "a fresh LoHa": (LOHA, plain, OF_WEIGHTS, "layers", "8 of 8 deltas are zero"),
    "a fresh IA³, by outputs": (IA3, plain, STAGES, "layers", "1 output with and without it is bitwise equal"),
    "LoRA": (LORA, random, STAGES, "layers", None),
    "DoRA": (LoraConfig(target_modules=TARGETS, r=4, use_dora=True), random, STAGES, "", None),
    "LoHa": (LOHA, random, STAGES, "layers", None),
    "IA³": (IA3, random, STAGES, "layers", None),
    "tokens": (TrainableTokensConfig(token_indices=[1, 2]), random, STAGES, "some-tokens", None),
    "a prompt": (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), random, STAGES, "", None),
    # the factors are zeros, but the head is not the base's
    "a trained head": (
        LoraConfig(target_modules=TARGETS, r=4, modules_to_save=["lm_head"]), train_head, OF_WEIGHTS, "", None,
    ),
}  # fmt: skip
"""Adapters and their training, the stages that are run, the recorded effect, and the warning if there is one."""


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_nothing_is_a_warning_and_one_that_changes_something_is_none(effect: Effect, name: str) -> None:
    config, change, stages, recorded, text = CASES[name]
    assert effect(config, change, stages) == (recorded, [] if text is None else [text])
