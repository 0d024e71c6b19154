"""A stage that raises loses itself: the worker goes on, with the model as it was or with the reason why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.capture.names import LOADED_AGAIN, RAISED
from consistency.capture.records import TensorRecord
from consistency.errors import InputError
from consistency.stages.memory import worker as memory
from consistency.stages.merged import worker as merged
from consistency.worker import session
from consistency.worker.stage_failure import is_of_a_stage, stated
from tests.worker.conftest import Look
from tests.worker.model.made_models import on_llama, perturb

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

STAGES = ("base", "adapter", "merged", "memory")
Act = Callable[[Any], None]


@pytest.fixture
def adapter(llama: Path) -> Path:
    return on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"]))


def failing(act: Act) -> Act:
    def run(context: Any) -> None:
        context.record.fact("merged", "x", "y", status="equal")
        act(context)
        raise ZeroDivisionError("nobody expects it\nfor good reasons")

    return run


def blocked(records: list[TensorRecord]) -> dict[str, str | None]:
    return {r.stage: r.reason for r in records if r.status == "blocked"}


def untouched(_: Any) -> None:
    pass


def another_structure(context: Any) -> None:
    layer = next(m for m in context.model.modules() if isinstance(m, torch.nn.Linear))
    layer.weight.requires_grad_(True)
    layer.register_forward_hook(lambda *_: None)
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight))


@pytest.mark.parametrize("act", [untouched, another_structure])
def test_the_stages_after_it_run_as_if_it_had_not(
    llama: Path, adapter: Path, look: Look, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    sound = look(llama, adapter, stages=(*STAGES, "forward"))
    monkeypatch.setattr(merged, "run", failing(act))
    found = look(llama, adapter, stages=(*STAGES, "forward"))
    row = next(r for r in found if r.status == "blocked")
    assert (row.stage, row.layer, row.tensor) == ("merged", "model", "everything")
    assert row.reason is not None
    assert row.reason.startswith("the stage failed: ZeroDivisionError: nobody expects it (in run, worker/test_stage")
    assert RAISED in row.evidence
    assert any(r.layer == "x" for r in found), "what it had recorded stays"

    def rows(records: list[TensorRecord]) -> list[Any]:
        return [(r.key, r.status, r.digest) for r in records if r.stage != "merged"]

    assert rows(found) == rows(sound)


def other_base_bytes(context: Any) -> None:
    context.base.tensors["model.norm.weight"].data[3] += 1


def other_adapter_bytes(context: Any) -> None:
    name = next(iter(context.expected))
    context.model.get_parameter(name).data[0] += 1


@pytest.mark.parametrize(("act", "name"), [(other_base_bytes, "model.norm.weight"), (other_adapter_bytes, "lora_A")])
def test_the_stages_after_it_say_what_it_left_changed(
    llama: Path, adapter: Path, look: Look, monkeypatch: pytest.MonkeyPatch, act: Act, name: str
) -> None:
    monkeypatch.setattr(merged, "run", failing(act))
    found = blocked(look(llama, adapter, stages=(*STAGES, "operators")))
    assert found.keys() == {"merged", "memory"}
    assert "the stage merged failed and left the model changed" in (found["memory"] or "")
    assert name in (found["memory"] or "")


def test_a_model_that_cannot_be_loaded_blocks_the_stages_that_need_it(
    llama: Path, adapter: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in a library")

    monkeypatch.setattr(session, "expected_adapter", fail)
    found = look(llama, adapter, stages=(*STAGES, "operators"))
    assert blocked(found).keys() == {"adapter", "merged", "memory"}
    assert {r.status for r in found if r.stage == "base"} >= {"equal"}
    assert any(r.stage == "operators" for r in found)
    monkeypatch.setattr(session, "load_base", fail)
    found = look(llama, adapter, stages=STAGES)
    assert blocked(found).keys() == set(STAGES)
    assert "the model could not be loaded: ZeroDivisionError: in a library" in (blocked(found)["base"] or "")


@pytest.mark.parametrize(
    "error",
    [InputError("theirs"), OSError("disk full"), MemoryError(), RuntimeError("not enough memory: you tried to")],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_fault_of_a_stage_ends_the_worker(
    llama: Path, look: Look, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr(memory, "run", fail)
    with pytest.raises(type(error)):
        look(llama, None, stages=("memory",))


def test_a_device_that_no_longer_computes_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch raises the same error for a wrong shape and for a device that is gone."""
    device = torch.device("cuda:0")
    assert is_of_a_stage(IndexError("a mask"), device)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.tensor([1.0, 1.0]))
    assert is_of_a_stage(RuntimeError("shapes"), device)

    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch, "ones", gone)
    assert not is_of_a_stage(RuntimeError("CUDA error"), device)


def test_an_error_is_stated_with_its_place() -> None:
    assert stated(KeyError("x")) == "KeyError: 'x'"
    with pytest.raises(AttributeError) as caught:
        torch.nn.Linear(2, 2).get_submodule("no")
    assert stated(caught.value).startswith("AttributeError: Linear has no attribute `no` (in get_submodule, modules/m")


# ranks that were cut


def test_an_adapter_with_pruned_ranks_is_checked(llama: Path, look: Look, tmp_path: Path) -> None:
    """PEFT cannot load it a second time: an IndexError."""
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(llama),
        peft.AdaLoraConfig(total_step=10, init_r=4, target_r=2, target_modules=["q_proj", "v_proj"]),
    )
    perturb(model)
    layer = "model.layers.0.self_attn"
    model.peft_config["default"].rank_pattern = {
        f"{layer}.q_proj.lora_E.default": [True, False, True, True],
        f"{layer}.v_proj.lora_E.default": [False] * 4,
    }
    model.save_pretrained(tmp_path / "adalora")
    for stages in (("base", "adapter", "merged", "gradient", "forward", "memory"), ("adapter",)):
        found = look(llama, tmp_path / "adalora", stages=stages)
        assert not [r for r in found if r.status in ("outside", "missing", "unexpected", "blocked")]
        assert {r.stage for r in found} == {*stages, *(["merging"] if "forward" in stages else [])}
        from_file = [r for r in found if r.stage == "adapter" and r.reference == "file"]
        assert [r.shape for r in from_file if r.layer.endswith("q_proj")] == [(3, 32), (32, 3), (3, 1)]
        empty = [r for r in found if r.stage == "gradient" and "v_proj" in r.layer]
        assert {(r.status, r.reason) for r in empty} <= {("skipped", "it is empty: its layer has rank 0")}
        assert bool(empty) is ("gradient" in stages)
        (again,) = (r for r in found if r.tensor == LOADED_AGAIN)
        assert again.status == "skipped"
        assert "PEFT cannot load this adapter twice: IndexError" in (again.reason or "")


def test_a_factory_that_fails_ends_its_worker_with_its_own_error(llama: Path, look: Look) -> None:
    """It ended the whole run as bad input, without the device and the user's own lines."""
    base = Path("python:tests.worker.model.made_models:a_factory_that_fails")
    with pytest.raises(ZeroDivisionError, match="in the user's own code") as caught:
        look(base, None, stages=("base",))
    assert caught.traceback[-1].name == "a_factory_that_fails"
