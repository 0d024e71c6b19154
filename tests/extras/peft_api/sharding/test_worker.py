"""Laid out over shards, the model gives the answer of one device, or the run says in a sentence what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import check_device_map

from consistency.capture.folder import SCHEMA, CaptureManifest, worker_slug
from consistency.capture.reader import read_capture
from consistency.capture.records import WorkerInfo
from consistency.capture.writer import CaptureWriter
from consistency.case.builtin import builtin_folder
from consistency.case.preflight import prepare_case
from consistency.case.reading import make_options
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison
from consistency.extras.peft_api.sharding import worker as sharding
from consistency.extras.peft_api.sharding.device_maps import layouts, load, spread
from consistency.worker import session
from consistency.worker.protocol import EventLog, Job

Look = Callable[..., Comparison]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    def run(**options: Any) -> Comparison:
        case = prepare_case(make_options({"base": "builtin:gpt2", "stages": "sharding", "level": "quick", **options}))
        slug = worker_slug("cpu", "isolated")
        with CaptureWriter(tmp_path / "capture", replace=True) as writer:
            folder = writer.worker_folder(slug)
            job = Job(
                case=case, name="cpu", device="cpu", load_path="isolated", folder=str(folder), blobs=str(writer.blobs),
                scratch=str(tmp_path), settings={}, makes_reference=True, threads=1, parent_pid=os.getpid(),
            )  # fmt: skip
            with EventLog(folder / "events.jsonl") as events:
                session.run(job, events)
            info = WorkerInfo(name="cpu", load_path="isolated", architecture="x86", model="chip", status="ok")
            writer.write_worker(slug, info)
            manifest = CaptureManifest(
                schema=SCHEMA, tool="0", created="2026-01-01", host="here", case=case, workers=(slug,)
            )
            return compare([read_capture(writer.commit(manifest))])

    return run


def statuses(found: Comparison) -> dict[tuple[str, str], str]:
    return {(t.layer, t.tensor): row.status for t in found.tensors for row in t.outcomes}


def test_layers_from_the_disk_give_the_same_bits(look: Look, tmp_path: Path) -> None:
    given = tmp_path / "map.json"
    given.write_text('{"transformer": "cpu", "lm_head": "cpu"}')
    found = look(device_map=str(given))
    assert found.verdict == "consistent"
    assert statuses(found) == {
        ("inputs", "input_ids"): "equal",
        ("inputs", "labels"): "equal",
        ("one device", "on the way"): "equal",
        **{(way, t): "equal" for way in ("given", "cpu and disk") for t in ("on the way", "loss", "logits")},
    }
    places = next(r.evidence["places"] for t in found.tensors if t.layer == "cpu and disk" for r in t.outcomes)
    assert set(places) == {"cpu", "disk"}
    assert not list(tmp_path.glob("offload-*")), "what lay on the disk is gone"


@pytest.mark.slow
def test_another_answer_is_found_and_the_last_bits_are_not(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    real = load
    factor = 1.0

    def load_wrong(*of: Any) -> torch.nn.Module:
        model = real(*of)
        block: Any = next(module for name, module in model.named_modules() if name.endswith("h.0.mlp"))
        block.register_forward_hook(lambda _, __, found: found * factor)
        return model

    monkeypatch.setattr(sharding, "load", load_wrong)
    factor = 1 + 2**-23
    found = look(stages="forward,sharding")
    assert statuses(found)["cpu and disk", "logits"] == "within"
    assert found.verdict == "consistent"
    assert statuses(look(stages="sharding"))["cpu and disk", "logits"] == "skipped", "nothing to judge it by"
    factor = 1 + 1e-3
    found = look(stages="forward,sharding")
    assert statuses(found)["cpu and disk", "logits"] == "outside"
    assert [f.kind for f in found.findings if f.severity == "error"] == ["other-answer"]
    outside = next(r for t in found.tensors if t.tensor == "logits" and t.layer == "cpu and disk" for r in t.outcomes)
    assert outside.evidence["first"] == "transformer.h.0.mlp", "the first module that is outside"


@pytest.mark.parametrize("lost", [False, True])
def test_a_kernel_that_asserts_ends_in_a_sentence(look: Look, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    error = (
        RuntimeError("CUDA error: device-side assert triggered") if lost else IndexError("index out of range in self")
    )

    def outputs(*_: object) -> dict[str, torch.Tensor]:
        raise error

    monkeypatch.setattr(sharding, "_outputs", outputs)
    (finding,) = [f for f in look().findings if f.severity == "error"]
    assert finding.kind == "ids-changed"
    assert "ids or labels changed during transfer to device cpu: input_ids, labels are inside" in finding.message


def test_inputs_of_the_user_are_looked_at_first(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr(sharding, "_answer", lambda *_: pytest.fail("no device may be asked"))
    ids = torch.arange(12).reshape(2, 6)
    for name, word in (("labels", "labels-past-vocabulary"), ("input_ids", "ids-past-vocabulary")):
        save_file({"input_ids": ids, "labels": ids.clone(), name: ids + 510}, tmp_path / "in.safetensors")
        (finding,) = [f for f in look(inputs=str(tmp_path / "in.safetensors")).findings if f.severity == "error"]
        assert finding.kind == word


def test_without_room_it_is_skipped(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "available_bytes", lambda: 1000)
    found = look()
    assert found.verdict == "consistent"
    rows = [row for t in found.tensors for row in t.outcomes if row.status == "skipped"]
    assert "no room for another copy of the base" in (rows[0].reason or "")


def test_what_the_allocator_keeps_for_reuse_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(free=0)
    device.empty_cache = lambda: setattr(device, "free", 1 << 30)
    device.mem_get_info = lambda _: (device.free, 1 << 30)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    base = SimpleNamespace(tensors={"weight": torch.ones(1)})
    context: Any = SimpleNamespace(base=base, scratch=tmp_path, device=torch.device("cuda:0"))
    sharding._require_room(context)  # else it raises `Skip`


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_layers_in_turn_over_places(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.from_pretrained(builtin_folder(name) / "base")
    with torch.device("meta"):
        auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
        model = auto.from_config(config)
    found = spread(model.to_empty(device="cpu"), [0, 1, 2])
    check_device_map(model, found)  # every parameter has a place
    assert list(dict.fromkeys(found.values()))[:1] == [0]
    assert set(found.values()) == {0, 1, 2}
    blocks = [place for unit, place in found.items() if unit.rpartition(".")[2].isdigit()]
    assert blocks == sorted(blocks)


def test_tied_weights_stay_together() -> None:
    model = torch.nn.Module()
    model.table, model.layers = torch.nn.Embedding(4, 2), torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    model.head = torch.nn.Linear(2, 4, bias=False)
    assert spread(model, [0, 1])["head"] == 1
    model.head.weight = model.table.weight
    assert spread(model, [0, 1])["head"] == 0


def test_one_worker_takes_the_ways_over_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consistency.extras.peft_api.sharding.device_maps._visible", lambda _: ["cuda:0", "cuda:1"])
    case, model = prepare_case(make_options({"base": "builtin:gpt2"})), torch.nn.Sequential(torch.nn.Linear(1, 1))
    names = [way.name for way in layouts(case, torch.device("cuda:0"), model)]
    assert names == [
        "auto", "balanced", "sequential", "layers in turn", "layers in turn, by way of the host", "cuda and cpu",
    ]  # fmt: skip
    assert [way.name for way in layouts(case, torch.device("cuda:1"), model)] == ["cuda and cpu"]
