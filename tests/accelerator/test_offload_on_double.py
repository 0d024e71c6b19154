"""A model three times as large as its device: streamed through it, checked whole, and a fault in one layer found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.case.budget.shape import read_shape
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from tests.reported import environments

from .fixtures import Double, RunOnDouble, RunsOnDouble

# PEFT and transformers warn while saving
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYERS = 8
STAGES = "base,adapter,merged,gradient,forward,memory,sharding"

# one worker is healthy, and of the other a fault hits the last layer's weight whenever it arrives
RUN = """
import dataclasses, sys
from pathlib import Path
from consistency.case.reading import make_options
from consistency.workflows import pipeline

base, adapter, stages, out = sys.argv[1:]
table = {"base": base, "adapter": adapter, "devices": "cpu,npu:0,npu:1", "stages": stages, "load_paths": "isolated"}
plan = dataclasses.replace(pipeline.prepare(make_options(table)), faults={"npu:1": "offload-bit-flip"})
done = pipeline.run(plan, Path(out), watch=lambda *_: None)
sys.exit(done.comparison.exit_status)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save a base of 7 MB whose largest weight takes a twenty-eighth of it, and an adapter."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    peft.get_peft_model(base, lora).save_pretrained(folder / "adapter", save_embedding_layers=False)
    return folder / "base", folder / "adapter"


def a_third(model: tuple[Path, Path]) -> int:
    return read_shape(prepare_case(Options(base=str(model[0])))).loaded_bytes // 3


@pytest.fixture(scope="module")
def run(double: Double, model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> RunOnDouble:
    out = tmp_path_factory.mktemp("offloaded") / "out"
    return RunOnDouble(double.python("-c", RUN, *model, STAGES, out, devices=2, memory_bytes=a_third(model)), out)


def rows_of(run: RunOnDouble, worker: str) -> list[tuple[str, str, str, str]]:
    return [
        (t.stage, t.layer, t.tensor, row.status)
        for t in run.comparison.tensors
        if (row := t.outcome(worker)) is not None
    ]


@pytest.mark.process
def test_the_healthy_worker_has_no_finding(run: RunOnDouble) -> None:
    assert run.process.returncode == 1, run.process.stdout + run.process.stderr
    found = rows_of(run, "npu:0")
    assert {status for stage, _, _, status in found if stage in ("base", "adapter")} == {"equal"}
    judged = [status for stage, *_, status in found if stage in ("merged", "gradient", "forward", "memory")]
    assert set(judged) == {"equal", "within"}
    weights = {(layer, tensor) for stage, layer, tensor, _ in found if stage == "base"}
    assert len(weights) == 9 * LAYERS + 5, "the two tables of rotary frequencies too"
    assert sum(stage == "merged" for stage, *_ in found) == 3 * (2 * LAYERS + 1), "delta, weight and safe weight"
    of_blocks = LAYERS + 1  # of what enters each but the first, of what leaves the last, and what all are given
    assert sum(stage == "gradient" for stage, *_ in found) == 2 * 2 * (2 * LAYERS + 1) + of_blocks, "and of each factor"
    modes = {tensor.partition(".")[0] for stage, _, tensor, _ in found if stage == "forward"}
    assert modes == {"adapter_on", "adapter_off", "adapter_merged"}
    assert [(stage, status) for stage, *_, status in found if status == "skipped"] == [("sharding", "skipped")]


@pytest.mark.process
def test_a_flipped_bit_is_found_in_the_layer_where_it_arrives(run: RunOnDouble) -> None:
    errors = [finding for finding in run.comparison.findings if finding.severity == "error"]
    assert {finding.workers for finding in errors} == {("npu:1",)}
    assert (errors[0].kind, errors[0].message.partition(" · ")[0]) == ("bit-flip", "base")
    assert errors[0].tensors == (f"base::model.layers.{LAYERS - 1}.mlp.down_proj.weight",)
    (first,) = run.comparison.first_divergence
    assert (first.workers, first.layer) == (("npu:1",), f"model.layers.{LAYERS - 1}.mlp.down_proj")


@pytest.mark.process
def test_the_report_states_what_was_offloaded_and_why(run: RunOnDouble) -> None:
    said = {name: str(environment.get("placement", "")) for (name, _), environment in environments(run.report).items()}
    assert not said["cpu"]
    for name in ("npu:0", "npu:1"):
        assert said[name].startswith("offload: the stages need ")
        assert said[name].endswith(" 7.0 MiB of it for the base, and 2.3 MiB are free")


@pytest.mark.process
def test_the_device_holds_a_layer_and_the_host_no_second_model(run: RunOnDouble, model: tuple[Path, Path]) -> None:
    worker: dict[str, Any] = json.loads((run.folder / "captures/workers/npu_0.isolated/worker.json").read_text())
    stages = {stage["stage"]: stage for stage in worker["stage_memory"]}
    assert max(stage["device_peak_bytes"] for stage in stages.values()) <= a_third(model)
    assert stages["base"]["device_resident_bytes"] < 2**16, "no weight stays"


def test_without_offloading_the_worker_runs_out_of_memory(
    run_on_double: RunsOnDouble, model: tuple[Path, Path]
) -> None:
    run = run_on_double(
        {"devices": 1, "memory_bytes": a_third(model)},
        base=str(model[0]), adapter=str(model[1]), devices="npu:0", stages="base", placement="device",
    )  # fmt: skip
    assert run.process.returncode == 3
    (worker,) = run.report["workers"]
    assert "out of memory" in worker["reason"]


@pytest.mark.parametrize(("shares", "placement"), [(False, "offload: "), (True, "device")])
def test_what_the_host_can_reclaim_is_free_on_a_device_that_shares_its_memory(
    double: Double, model: tuple[Path, Path], shares: bool, placement: str
) -> None:
    """`cudaMemGetInfo` counts the page cache as used, and a base that has just been read is in it."""
    code = """
import sys, torch
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.worker.memory.offload_choice import choose
print(choose(prepare_case(Options(base=sys.argv[1])), torch.device("npu:0")))
"""
    size = 2**30
    settings = {"devices": 1, "memory_bytes": size, "reclaimable_bytes": size - 2**20, "shares_memory": shares}
    done = double.python("-c", code, model[0], **settings)
    assert done.stdout.startswith(placement), done.stderr
