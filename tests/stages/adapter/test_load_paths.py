"""Alternative load paths in one worker: each is told apart from the others, and the model is afterwards what it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from msgspec.structs import asdict

from consistency.capture.names import CAST_ON_THE_WAY, LOADED_AGAIN
from consistency.capture.records import TensorRecord
from consistency.capture.writer import CaptureWriter
from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.numerics.digest import digest
from consistency.stages.adapter import load_paths
from consistency.stages.adapter.load_paths import stand_in
from consistency.worker import recorder, session
from consistency.worker.context import Context
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.poison import as_it_was
from consistency.worker.protocol import EventLog
from tests.capture.whole import read_records
from tests.versions import loads_by_transformers
from tests.worker.made_jobs import job_in

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

SIDES = tuple(load_path for load_path in LoadPath if load_path.main is LoadPath.ISOLATED and not load_path.is_main)
Fingerprint = dict[str, tuple[int, int, str]]


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Return which objects the model's tensors are, where they lie, and what they hold."""
    state = model.state_dict(keep_vars=True)
    return {name: (id(tensor), tensor.data_ptr(), digest(tensor).value) for name, tensor in state.items()}


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[TensorRecord], list[Fingerprint], list[bool]]:
    """Take every alternative load path once, in this process, with a base in bfloat16 and an adapter in float32.

    Return the records, the model before and after, and whether PEFT found poison whenever it loaded again.
    """
    home = tmp_path_factory.mktemp("load_paths")
    case = prepare_case(Options(base="builtin:llama", dtype="bfloat16", stages=(standard.ADAPTER,)))
    seen: list[Fingerprint] = []
    poisoned: list[bool] = []
    real, real_load = load_paths.run, peft.PeftModel.load_adapter

    def load(model: Any, *args: Any, **options: Any) -> Any:
        poisoned.append(all(bool(p.isnan().all()) for name, p in model.named_parameters() if "lora_" in name))
        return real_load(model, *args, **options)

    def run(context: Context, by_digest: Any) -> None:
        seen.append(fingerprint(context.model))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peft.PeftModel, "load_adapter", load)
            real(context, by_digest)
        seen.append(fingerprint(context.model))

    with CaptureWriter(home / "capture") as writer, pytest.MonkeyPatch.context() as patch:
        job = job_in(writer, case, home, alternative_paths=SIDES)
        patch.setattr(load_paths, "run", run)
        with EventLog(Path(job.folder, "events.jsonl")) as events:
            session.run(job, events)
        return list(read_records(Path(job.folder, "records.jsonl"))), seen, poisoned


Taken = tuple[list[TensorRecord], list[Fingerprint], list[bool]]


@loads_by_transformers
def test_every_path_is_taken_over_poison_and_holds_every_tensor(taken: Taken) -> None:
    records, _, poisoned = taken
    adapter = {r.key for r in records if r.rule == "bitwise" and not r.load_path}
    assert len(adapter) == 56
    for load_path in SIDES:
        here = [r for r in records if r.load_path == load_path]
        assert {r.key for r in here if r.rule == "bitwise"} == adapter
        assert {r.status for r in here} == {"equal"}
    assert len(poisoned) == sum(not load_path.by_transformers for load_path in SIDES)
    assert all(poisoned)


@loads_by_transformers
def test_the_model_is_what_it_was(taken: Taken) -> None:
    """The same objects in the same memory with the same bytes: `low_cpu_mem_usage` had put others in their places."""
    before, after = taken[1]
    assert len(before) > 56
    assert before == after


@loads_by_transformers
def test_peft_casts_through_the_dtype_of_the_base_with_low_cpu_mem_usage_alone(taken: Taken) -> None:
    """Settled by a run, see docs/upstream-peft.md: what reads as float32 holds bfloat16's values."""
    for load_path in (LoadPath.ISOLATED, *SIDES):
        here = [r for r in taken[0] if r.rule == "bitwise" and (r.load_path or "isolated") == load_path]
        through = {r.evidence.get(CAST_ON_THE_WAY) for r in here}
        assert {r.cast or None for r in here} == through
        dtypes = {r.dtype for r in here}
        if load_path.by_transformers:
            assert (through, dtypes) == ({None}, {"bfloat16"})
        else:
            assert (through, dtypes) == ({"bfloat16"} if load_path.low_memory else {None}, {"float32"})


# what no real load does


@pytest.fixture
def tiny() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    base = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))


def test_whatever_a_load_puts_in_place_is_taken_out_again(tiny: Any) -> None:
    before = fingerprint(tiny)
    names = {name: None for name in before if "lora_" in name}
    layer = tiny.base_model.model.model.layers[0].self_attn.q_proj
    with suppress(MemoryError), as_it_was(tiny, names):
        layer.lora_A[ADAPTER_NAME].weight = torch.nn.Parameter(torch.zeros(2, 8, dtype=torch.bfloat16))
        layer.lora_B[ADAPTER_NAME].weight.data = torch.ones(8, 2)
        layer.lora_B[ADAPTER_NAME].register_buffer("more", torch.ones(1))
        raise MemoryError
    assert fingerprint(tiny) == before


def test_a_stand_in_takes_no_memory_and_lets_nothing_through(tiny: Any) -> None:
    before = fingerprint(tiny)
    shell = stand_in(tiny, torch.device("cpu"))
    weight, its = (m.base_model.model.model.embed_tokens.weight for m in (shell, tiny))
    assert (weight.shape, weight.dtype, weight.device) == (its.shape, its.dtype, its.device)
    assert weight.untyped_storage().nbytes() == weight.element_size()
    with torch.no_grad():
        weight.fill_(1)
    shell.unload()
    assert fingerprint(tiny) == before
    its_kind = type("Quantized", (torch.nn.Parameter,), {})
    tiny.base_model.model.model.norm.weight = its_kind(torch.ones(8))
    with pytest.raises(TypeError, match="no stand-in for a Quantized"):
        stand_in(tiny, torch.device("cpu"))


class Recorder:
    skipping, skipped = recorder.Recorder.skipping, recorder.Recorder.skipped

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def wants(self, *_: str) -> bool:
        return True

    @contextmanager
    def on_load_path(self, _: LoadPath) -> Iterator[None]:
        yield

    def write(self, row: TensorRecord) -> None:
        self.said.append(asdict(row))

    def step(self, *_: object) -> None:
        pass


class Made:
    """As much of a context as a load path looks at before it loads."""

    def __init__(self, model: Any, *sides: LoadPath, adapter: str = "/none") -> None:
        self.record = self.events = Recorder()
        self.model, self.base, self.job, self.case = model, self, self, self
        self.alternative_paths, self.adapter, self.device = sides, adapter, "cpu"
        self.rewritten: frozenset[str] = frozenset()
        self.expected = {name: None for name in model.state_dict() if "lora_" in name}

    def take(self) -> list[dict[str, Any]]:
        load_paths.run(cast("Context", self), {})
        return self.record.said


@pytest.mark.parametrize(
    ("load_path", "base", "reason"),
    [
        (LoadPath.ISOLATED_LOW_MEMORY, None, "PEFT cannot load this adapter twice: "),
        (LoadPath.ISOLATED_TRANSFORMERS, None, "transformers cannot load this adapter: "),
        (
            LoadPath.ISOLATED_TRANSFORMERS,
            type("Base", (), {"model": torch.nn.Linear(1, 1)})(),
            "the base is not a transformers model: it has no load_adapter",
        ),
    ],
)
def test_a_path_that_cannot_be_taken_says_why(tiny: Any, load_path: LoadPath, base: Any, reason: str) -> None:
    before = fingerprint(tiny)
    made = Made(tiny, load_path)
    made.base = base or tiny.base_model  # whose `model` is what transformers made
    (said,) = made.take()
    assert (said["tensor"], said["status"]) == (LOADED_AGAIN, "skipped")
    assert said["reason"].startswith(reason)
    assert fingerprint(tiny) == before


def test_a_method_that_rewrites_the_base_needs_its_numbers(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """OLoRA subtracts from the base's weight in place; of a stand-in all elements lie in one place."""

    def subtract(model: Any, *_: object, **__: object) -> None:
        model.lm_head.weight.data.sub_(torch.ones(16, 8))

    monkeypatch.setattr(transformers.LlamaForCausalLM, "load_adapter", subtract)
    made = Made(tiny, LoadPath.ISOLATED_TRANSFORMERS)
    made.base = tiny.base_model
    made.rewritten = frozenset({"lm_head.weight"})
    (said,) = made.take()
    assert said["reason"].endswith("its method computes from the base's values, which the stand-in for the base lacks")


def test_transformers_loader_takes_no_prompt() -> None:
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16))
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    made = Made(peft.get_peft_model(base, config), LoadPath.ISOLATED_TRANSFORMERS)
    made.base = cast("Made", type("Base", (), {"model": base})())
    (said,) = made.take()
    assert said["reason"] == "transformers does not load prompts"


@pytest.mark.parametrize("load_path", [LoadPath.ISOLATED_LOW_MEMORY, LoadPath.ISOLATED_TRANSFORMERS])
def test_out_of_memory_is_no_adapter_that_cannot_be_loaded(
    tiny: Any, load_path: LoadPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(peft.PeftModel, "load_adapter", fail)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "load_adapter", fail)
    before = fingerprint(tiny)
    made = Made(tiny, load_path)
    made.base = tiny.base_model
    with pytest.raises(torch.OutOfMemoryError):
        made.take()
    assert fingerprint(tiny) == before
