"""Several adapters on an accelerator, and no CPU worker beside it: its float64 is computed on a copy of the model."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers

from tests.worker.model.made_models import a_llama, adapter_on, saved

from .fixtures import Double

# PEFT and transformers warn while saving
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_an_accelerator_alone(double: Double, tmp_path: Path) -> None:
    base, words = saved(a_llama(), tmp_path / "base"), []
    for number, name in enumerate(("one", "two")):
        torch.manual_seed(number)
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        adapter = adapter_on(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), tmp_path / name)
        words += ["--adapter", f"{name}={adapter}"]
    out = tmp_path / "out"
    done = double.python(
        "-m", "consistency", "run", "--base", base, *words, "--devices", "npu:0", "--dtype", "bfloat16",
        "--stages", "forward,adapters", "--load-paths", "isolated", "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    (merging,) = report["merging"]
    assert merging["worker"] == "npu:0"
    assert 0 < merging["moved"] == pytest.approx(merging["must"], rel=0.1)
    rows = {(one["layer"], one["tensor"]): one["status"] for one in report["outcomes"] if one["stage"] == "adapters"}
    place = "model.layers.0.self_attn.q_proj"
    assert {rows[place, f"{kind}.lora_B"] for kind in ("dare_ties", "svd", "dare_linear_svd")} == {"within"}
    assert rows["add_weighted_adapter(dare_linear)", "density"] == "within"
