"""The stages in which ranks train or hold one model, by gloo, on kernel variants of this machine's CPU."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.devices.discovery import discover
from tests.conftest import Cli

DEVICES = [info.spec.name for info in discover() if info.spec.is_cpu and info.spec.name in ("cpu", "cpu@baseline")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(DEVICES) < 2, reason="this processor has one kernel variant: there is no group"),
]


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(cli: Cli, tmp_path: Path) -> Run:
    """Run a case of the test's folder, and return its report."""

    def report(*words: str) -> dict[str, Any]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = cli("run", "--devices", ",".join(DEVICES), "--out", "out", *words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
        return found

    return report


def statuses(found: dict[str, Any], stage: str, suffix: str) -> set[str]:
    return {row["status"] for row in found["outcomes"] if row["stage"] == stage and suffix in row["tensor"]}


def test_healthy_ranks_train_and_hold_one_model(run: Run) -> None:
    found = run("--stages", "replicas,shards,tensor-parallel")
    assert {finding["severity"] for finding in found["findings"]} == {"note"}
    for stage, suffixes in {
        "replicas": ("start", "averaged", "updated"), "shards": ("held", "gathered", "gradient", "updated", "saved"),
        "tensor-parallel": ("held", "gathered", "adapter_on", "adapter_off"),
    }.items():  # fmt: skip
        for suffix in suffixes:
            assert statuses(found, stage, suffix) <= {"equal", "within"} != set(), (stage, suffix)
            assert statuses(found, stage, suffix), (stage, suffix)
    held = [row for row in found["outcomes"] if (row["stage"], row["tensor"]) == ("tensor-parallel", "held")]
    assert held
    assert all(row["evidence"]["split"] > 0 for row in held), "else no fault is planted in a part"
    messages = {finding["kind"]: finding["message"] for finding in found["findings"]}
    assert "added after fully_shard, never synchronized (56 of 56 tensors" in messages["unsynchronized"]
    assert messages["replica-drift"].startswith("replicas · cpu@baseline · 56 of 56 tensors of the adapter differ")
    assert messages["healthy-split"].endswith("on one device: healthy")


def test_a_mixture_of_experts_is_split_by_both_plans(tmp_path: Path, run: Run) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        moe_intermediate_size=32, num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_a_proj", "o_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    found = run("--base", "base", "--adapter", "adapter", "--stages", "shards,tensor-parallel")
    assert {finding["severity"] for finding in found["findings"]} == {"note"}
    assert statuses(found, "tensor-parallel", "held") == {"equal"}
    reasons = {row["reason"] for row in found["outcomes"] if row["status"] == "skipped"}
    assert reasons == {
        "the model makes decisions (a router, a selection), which are not followed in a model that is split"
    }


def test_a_prompt_is_trained_in_parts_and_what_peft_cannot_do_with_it_is_said(tmp_path: Path, run: Run) -> None:
    """PEFT saves none of a model in parts, and reads the base's embedding before its pass."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(model, prompt).save_pretrained(tmp_path / "adapter")
    found = run("--base", "base", "--adapter", "adapter", "--stages", "shards")
    assert found["verdict"] == "consistent"
    assert statuses(found, "shards", "updated") == {"within"}
    reasons = {row["tensor"]: row["reason"] for row in found["outcomes"] if row["status"] == "skipped"}
    assert reasons["saved"].startswith("PEFT does not save it from a model in parts: ")
    assert "where fully_shard has it in parts" in reasons["adapter added after fully_shard"]


def test_a_rank_that_divides_no_heads_is_apart(tmp_path: Path, run: Run) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    found = run("--base", "base", "--adapter", "adapter", "--stages", "tensor-parallel")
    rows = [row for row in found["outcomes"] if row["stage"] == "tensor-parallel"]
    assert {row["status"] for row in rows} == {"skipped"}
    assert {row["reason"] for row in rows} == {"no group of ranks divides the attention heads of this model"}


FACTORY = """
import os
import numpy, torch, transformers

def make():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    ))
    values = numpy.random.default_rng(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.from_numpy(values.standard_normal(parameter.shape, dtype="float32") * 0.02))
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        model.model.rotary_emb.inv_freq *= 1 + 2**-20
    return model
"""


def test_tables_that_the_first_rank_overwrites_are_no_finding(tmp_path: Path, run: Run) -> None:
    """DistributedDataParallel sends buffers too: unlike devices compute rotary tables with other bits."""
    (tmp_path / "made_here.py").write_text(FACTORY, encoding="utf-8")
    namespace: dict[str, Any] = {}
    exec(FACTORY, namespace)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(namespace["make"](), lora).save_pretrained(tmp_path / "adapter")
    found = run("--base", "python:made_here:make", "--adapter", "adapter", "--stages", "replicas")
    assert {finding["severity"] for finding in found["findings"]} <= {"note"}
    assert statuses(found, "replicas", "updated") <= {"equal", "within"} != set()


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: it is built on the machine"
)
def test_healthy_ranks_train_by_zero(run: Run) -> None:
    found = run("--stages", "shards")
    assert {finding["severity"] for finding in found["findings"]} == {"note"}
    assert statuses(found, "shards", "ZeRO-3, lora_A.updated") == {"within"}
    assert statuses(found, "shards", "lora_A.gradient of 2 ranks, ZeRO-3") == {"within"}
    assert statuses(found, "shards", "ZeRO-3, updated parameters") == {"equal"}
