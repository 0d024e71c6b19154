"""A base that stays loaded between two cases: nothing of one adapter is left when the next one comes."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.capture.writer import CaptureWriter
from consistency.errors import InputError
from consistency.worker import session
from consistency.worker.model import kept_base
from consistency.worker.model.kept_base import BaseKeeper
from consistency.worker.protocol import STATE_FILE, EventLog, Job
from tests.worker.model.made_models import a_llama, adapter_on, case_of, saved

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

_Q = {"target_modules": ["q_proj"]}
_PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}

METHODS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "all-linear": peft.LoraConfig(r=4, target_modules="all-linear"),
    "embeddings": peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "dora": peft.LoraConfig(r=4, use_dora=True, **_Q),
    "replicated": peft.LoraConfig(r=4, layer_replication=[[0, 1], [0, 1]], **_Q),
    "pissa": peft.LoraConfig(r=4, init_lora_weights="pissa", **_Q),
    "olora": peft.LoraConfig(r=4, init_lora_weights="olora", **_Q),
    "saved-modules": peft.LoraConfig(r=4, modules_to_save=["lm_head", "embed_tokens"], **_Q),
    "tokens-beside": peft.LoraConfig(r=4, trainable_token_indices=[1, 2], **_Q),
    "tokens": peft.TrainableTokensConfig(token_indices=[1, 5], target_modules=["embed_tokens"]),
    "adalora": peft.AdaLoraConfig(total_step=10, init_r=4, target_r=2, **_Q),
    "loha": peft.LoHaConfig(r=2, **_Q),
    "lokr": peft.LoKrConfig(r=2, **_Q),
    "ia3": peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "boft": peft.BOFTConfig(boft_block_size=4, **_Q),
    "oft": peft.OFTConfig(r=0, oft_block_size=4, **_Q),
    "vera": peft.VeraConfig(r=4, **_Q),
    "vblora": peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, **_Q),
    "fourierft": peft.FourierFTConfig(n_frequency=10, **_Q),
    "hra": peft.HRAConfig(r=2, **_Q),
    "shira": peft.ShiraConfig(r=2, **_Q),
    "c3a": peft.C3AConfig(block_size=8, **_Q),
    "miss": peft.MissConfig(r=4, **_Q),
    "road": peft.RoadConfig(group_size=8, **_Q),
    "randlora": peft.RandLoraConfig(r=2, **_Q),
    "delora": peft.DeloraConfig(r=2, **_Q),
    "layer-norm": peft.LNTuningConfig(target_modules=["norm"]),
    "prompt": peft.PromptTuningConfig(**_PROMPT),
    "prefix": peft.PrefixTuningConfig(**_PROMPT),
    "p-tuning": peft.PromptEncoderConfig(encoder_hidden_size=8, **_PROMPT),
    "adaption-prompt": peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM"),
    "poly": peft.PolyConfig(r=2, n_tasks=1, n_skills=2, **_Q),
}

Rows = dict[tuple[str, str, str], Any]


class Made:
    """A base and adapters on disk, and jobs about them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.base = saved(a_llama(), home / "llama")
        self._count = itertools.count()

    def adapter(self, name: str) -> Path:
        folder = self.home / name
        if not folder.exists():
            adapter_on(transformers.LlamaForCausalLM.from_pretrained(self.base), METHODS[name], folder)
        return folder

    def job(self, name: str | None, *, fault: str | None = None, **changes: Any) -> Job:
        home = self.home / f"job-{next(self._count)}"
        writer, scratch = CaptureWriter(home / "capture"), home / "scratch"
        scratch.mkdir()
        fields = {"stages": ("base", "adapter", "forward"), **changes}
        case = case_of(fields.pop("base", self.base), None if name is None else self.adapter(name), **fields)
        return Job(
            case=case, name="cpu", device="cpu", load_path="isolated", folder=str(writer.worker_folder("cpu")),
            blobs=str(writer.blobs), scratch=str(scratch), settings={}, makes_reference=True, threads=1,
            parent_pid=os.getpid(), fault=fault,
        )  # fmt: skip

    def run(self, *jobs: Job) -> list[tuple[str, Rows]]:
        """Return where the base of each case came from, and its rows."""
        bases = BaseKeeper(jobs)
        found = []
        for job in jobs:
            with EventLog(Path(job.folder, "events.jsonl")) as events:
                session.run(job, events, bases)
            state = json.loads(Path(job.folder, STATE_FILE).read_bytes())
            found.append((state["environment"].get("base", "loaded"), rows(job)))
        return found


def rows(job: Job) -> Rows:
    lines = [json.loads(line) for line in Path(job.folder, "records.jsonl").read_bytes().splitlines()]
    return {(line["stage"], line["layer"], line["tensor"]): line for line in lines}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("kept"))


@pytest.mark.slow
def test_of_no_method_anything_is_left_for_the_next_one(made: Made) -> None:
    """Each adapter comes after another one, and has the rows of a process of its own, to the bit."""
    alone = {name: made.run(made.job(name))[0][1] for name in METHODS}
    order = [*METHODS, "lora"]
    together = made.run(*(made.job(name) for name in order))
    assert [base.partition(",")[0] for base, _ in together[1:]] == ["kept from the case before"] * (len(order) - 1)
    different = {
        (before, name)
        for before, name, (_, found) in zip(order, order[1:], together[1:], strict=False)
        if found != alone[name]
    }
    assert not different


@pytest.mark.slow
def test_the_stages_that_merge_and_train_leave_nothing_either(made: Made) -> None:
    stages = ("base", "adapter", "merged", "gradient", "forward")
    names = ("dora", "saved-modules", "pissa", "lora")
    alone = {name: made.run(made.job(name, stages=stages))[0][1] for name in names}
    together = made.run(*(made.job(name, stages=stages) for name in names))
    assert {name: found for name, (_, found) in zip(names, together, strict=True)} == alone


def test_a_base_without_an_adapter_is_kept_too(made: Made) -> None:
    alone = made.run(made.job("lora"))[0][1]
    ((_, first), (kept, second), (_, third)) = made.run(made.job(None), made.job("lora"), made.job(None))
    assert kept.startswith("kept from the case before, 0 of")
    assert second == alone
    assert first == third


# what is left is seen


@pytest.mark.slow
def test_a_base_that_cannot_be_brought_back_is_loaded_anew(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = made.run(made.job("lora"))[0][1]
    monkeypatch.setattr(kept_base, "_restore", lambda *_: False)
    _, (base, found) = made.run(made.job("pissa"), made.job("lora"))
    assert base.startswith("loaded anew: model.layers.0.self_attn.q_proj.weight is not what it was")
    assert found == alone


def test_one_flipped_bit_is_seen_in_any_tensor(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a buffer, which no file holds, as well: it cannot be restored."""
    real = BaseKeeper.keep

    def keep(self: BaseKeeper, job: Job, model: Any, base: Any, *args: Any) -> None:
        real(self, job, model, base, *args)
        base.tensors["model.rotary_emb.inv_freq"].view(torch.uint8)[0] ^= 1

    monkeypatch.setattr(BaseKeeper, "keep", keep)
    _, (base, found) = made.run(made.job("prompt"), made.job("lora"))
    assert base.startswith("loaded anew: model.rotary_emb.inv_freq is not what it was")
    monkeypatch.undo()
    assert found == made.run(made.job("lora"))[0][1]


@pytest.mark.slow
def test_a_base_that_no_file_holds_is_loaded_anew_after_it_was_rewritten(made: Made) -> None:
    factory = "python:tests.worker.model.made_models:a_model"
    first = made.run(made.job("lora", base=factory))[0][1]
    _, (base, found) = made.run(made.job("pissa", base=factory), made.job("lora", base=factory))
    assert base.startswith("loaded anew")
    assert found == first
    _, (base, found) = made.run(made.job("dora", base=factory), made.job("lora", base=factory))
    assert base.startswith("kept"), "a merge writes into copies"
    assert found == first


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16"}, {"fault": "base-bit-flip"}],
    ids=lambda changes: next(iter(changes)),
)
def test_only_the_same_base_is_kept(made: Made, changes: dict[str, Any]) -> None:
    odd = made.run(made.job("lora", **changes))[0][1]
    alone = made.run(made.job("lora"))[0][1]
    jobs = made.job("lora"), made.job("lora", **changes), made.job("lora")
    (_, first), (base, second), (again, third) = made.run(*jobs)
    assert (base, again) == ("loaded", "loaded")
    assert (first, second, third) == (alone, odd, alone)


def test_an_adapter_that_cannot_be_loaded_leaves_no_base(made: Made) -> None:
    """PEFT has begun to change the base when it fails."""
    jobs = [made.job("lora"), made.job("dora"), made.job("lora")]
    bases = BaseKeeper(jobs)
    weights = Path(jobs[1].case.adapter or "", "adapter_model.safetensors")
    kept = weights.read_bytes()
    try:
        for job in jobs:
            weights.write_bytes(kept[:-8] if job is jobs[1] else kept)
            with EventLog(Path(job.folder, "events.jsonl")) as events:
                if job is jobs[1]:
                    with pytest.raises(InputError):
                        session.run(job, events, bases)
                    assert not bases.keeps
                else:
                    session.run(job, events, bases)
    finally:
        weights.write_bytes(kept)
    assert rows(jobs[2]) == rows(jobs[0])


def test_a_single_case_keeps_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the base nor a note of its structure, which would cost time and memory."""
    monkeypatch.setattr(session, "Structure", None)
    bases = BaseKeeper((job := made.job("lora"),))
    with EventLog(Path(job.folder, "events.jsonl")) as events:
        session.run(job, events, bases)
    assert not bases.keeps
