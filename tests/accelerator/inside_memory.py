"""Memory of several devices and of the host, in one process that has the double: run by `test_memory_on_double.py`."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.capture.json_codec import decode_json
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.options import Placement as Placed
from consistency.case.preflight import prepare_case
from consistency.case.stage import Stage
from consistency.worker import session
from consistency.worker.memory.host_memory import private_bytes
from consistency.worker.memory.placement import Placement
from consistency.worker.protocol import STATE_FILE, EventLog, Job, WorkerState

pytestmark = [pytest.mark.filterwarnings("ignore")]  # what PEFT and transformers say is not ours to mend

npu: Any = torch.get_device_module("npu")

Facts = dict[tuple[str, str], TensorRecord]


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """Start as a new worker does: its process has touched nothing."""
    yield
    gc.collect()  # models are cycles
    npu.empty_cache()
    for index in range(npu.device_count()):
        npu.reset_peak_memory_stats(index)


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., tuple[Facts, WorkerState]]:
    number = itertools.count()

    def run(fault: str | None = None, *, device: str = "npu:1", case: Case | None = None) -> tuple[Facts, WorkerState]:
        folder = tmp_path / str(next(number))
        folder.mkdir()
        job = Job(
            case=case or prepare_case(Options(base="builtin:llama", stages=(standard.MEMORY,))), name=device,
            device=device, load_path="shared", folder=str(folder), blobs=str(folder), scratch=str(folder), settings={},
            makes_reference=False, threads=1, parent_pid=os.getpid(), fault=fault,
        )  # fmt: skip
        with EventLog(folder / "events.jsonl") as events:
            session.run(job, events)
        lines = (folder / "records.jsonl").read_bytes().splitlines()
        records = [decode_json(line, TensorRecord) for line in lines]
        return {(r.layer, r.tensor): r for r in records}, decode_json((folder / STATE_FILE).read_bytes(), WorkerState)

    return run


def outside(facts: Facts) -> set[tuple[str, str, str | None]]:
    return {(*key, r.word) for key, r in facts.items() if r.status == "outside"}


def test_peft_goes_through_device_0_and_the_call_is_told(look: Callable[..., tuple[Facts, WorkerState]]) -> None:
    facts, told = look()
    assert outside(facts) == set()
    touched = facts["npu:0", "allocated"]
    assert (touched.status, touched.word) == ("within", "touched")
    assert touched.evidence["first_step"] == "load adapter"
    assert touched.evidence["first_call"][0].startswith("safetensors/torch.py:")
    assert any("load_peft_weights" in frame for frame in touched.evidence["first_call"])
    file = builtin_folder("llama") / "adapter" / "adapter_model.safetensors"
    assert 0 < touched.evidence["peak_bytes"] <= file.stat().st_size
    assert touched.evidence["resident_bytes"] == 0
    assert {facts[f"npu:{i}", "allocated"].status for i in (2, 3)} == {"equal"}
    assert {r.status for (_, name), r in facts.items() if name == "placement"} == {"equal"}
    # and the merge is counted by the device's own allocator
    for name in ("merge_peak", "safe_merge_peak"):
        (peak,) = (r for (_, tensor), r in facts.items() if tensor == name)
        assert peak.status == "within"
        assert float(peak.limit_ratio or 0) > 0.5
    loaded = {s.stage: s for s in told.stage_memory}
    assert list(loaded) == ["load base", "load adapter", "base, after the adapter", "memory"]
    base, adapter = loaded["load base"].device_resident_bytes, loaded["load adapter"].device_resident_bytes
    assert base is not None
    assert adapter is not None
    assert adapter > base > 2**20
    peak_bytes = loaded["memory"].device_peak_bytes
    assert peak_bytes is not None
    assert peak_bytes >= adapter + 2 * 2**17, "the merge's two copies are part of its stage, whoever reset the mark"


@pytest.mark.parametrize(
    ("device", "options"), [("npu:0", {}), ("npu:1", {"torch_device": "npu:1"})], ids=["PEFT's own choice", "the cure"]
)
def test_where_peft_goes_straight_to_the_device_no_other_is_touched(device: str, options: dict[str, str]) -> None:
    folder = builtin_folder("llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", device_map={"": device})
    found = Placement(torch.device(device))
    found.look("transfer")  # digests leave their weights on a device, and the tests before have used others
    with found.watching():
        peft.PeftModel.from_pretrained(base, folder / "adapter", **options)
    found.look("load adapter")
    assert [found.first_step(other, "allocated") for other in found.others] == [None, None, None]
    assert not found.calls


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("placed-elsewhere", {("placement", "wrong-device"), ("allocated", "touched"), ("reserved", "touched")}),
        ("bytes-elsewhere", {("allocated", "touched"), ("reserved", "touched")}),
        ("merge-third-copy", {("merge_peak", "third-copy")}),
    ],
)
def test_faults(look: Callable[..., tuple[Facts, WorkerState]], fault: str, told: set[tuple[str, str]]) -> None:
    facts, _ = look(fault)
    found = outside(facts)
    assert {(tensor, word) for _, tensor, word in found} == told
    assert {layer for layer, _, _ in found if layer.startswith("npu:")} <= {"npu:0"}
    if fault == "placed-elsewhere":
        (wrong,) = (r for (_, tensor), r in facts.items() if tensor == "placement" and r.status == "outside")
        assert wrong.evidence == {"got": {"lora_A": "npu:0"}, "wanted": "npu:1"}


EVERY = (standard.BASE, standard.ADAPTER, standard.MERGED, standard.MEMORY)


def llama(folder: Path, *, layers: int, placement: Placed, stages: tuple[Stage, ...] = EVERY) -> Case:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=4
    )
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(r=1, target_modules=["q_proj"], layers_to_transform=[0], init_lora_weights=False)
    peft.get_peft_model(base, lora).save_pretrained(folder / "adapter")
    return prepare_case(
        Options(base=str(folder / "base"), adapter=str(folder / "adapter"), stages=stages, placement=placement)
    )


class PrivatePeak:
    """The most memory that no other process can share, by samples from another thread."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> PrivatePeak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps of earlier work is not this one's
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.is_set():
            self.bytes = max(self.bytes, private_bytes() or 0)
            self._done.wait(0.001)


@pytest.mark.parametrize("placement", ["device", "offload"])
def test_host_memory_does_not_grow_with_the_model(
    look: Callable[..., tuple[Facts, WorkerState]], tmp_path: Path, placement: Placed
) -> None:
    """The mapped file and the device's memory are not the process's own; a copy of the larger model would be."""
    peaks, base_bytes = [], []
    for layers in (8, 32):
        case = llama(tmp_path / str(layers), layers=layers, placement=placement)
        with PrivatePeak() as peak:
            look(case=case)
        peaks.append(peak.bytes)
        base_bytes.append((tmp_path / str(layers) / "base" / "model.safetensors").stat().st_size)
    assert base_bytes[1] > 3.9 * base_bytes[0]
    assert base_bytes[1] > 0.2 * peaks[0]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1), peaks


@pytest.mark.parametrize("stages", [(standard.MEMORY,), (standard.BASE, standard.MEMORY)], ids=["alone", "after base"])
def test_no_weight_of_an_offloaded_base_stays_on_the_device(
    look: Callable[..., tuple[Facts, WorkerState]], tmp_path: Path, stages: tuple[Stage, ...]
) -> None:
    _, told = look(case=llama(tmp_path, layers=2, placement="offload", stages=stages))
    head_bytes = 64 * 256 * 4  # the smallest matrix
    assert {s.stage: (s.device_resident_bytes or 0) < head_bytes / 2 for s in told.stage_memory} == dict.fromkeys(
        [s.stage for s in told.stage_memory], True
    )
