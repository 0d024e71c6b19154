"""A saved adapter is whole, trained, and fits its config and its base; each flaw is planted in a file of PEFT's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from consistency.cli.main import main
from consistency.comparison.result import Comparison
from consistency.errors import InputError
from consistency.extras.merging.check_adapter.result import check_adapter, statement
from tests.extras.merging.check_adapter.made_adapters import State, changed, save_adapter, save_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter") / "adapter", base)


def said(comparison: Comparison) -> dict[str, str]:
    """Return the messages of errors and warnings by kind."""
    return {str(f.kind): f.message for f in comparison.findings if f.severity != "note"}


def heading(comparison: Comparison) -> str:
    return statement(comparison).heading


def rows_of_first_rank(state: State) -> None:
    for key, tensor in state.items():
        if "lora_B" in key:
            tensor[tensor.shape[0] // 4 :] = 0


def zero_in_blocks(*numbers: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        for key, tensor in state.items():
            if "lora_B" in key and any(f"layers.{number}." in key for number in numbers):
                tensor.zero_()

    return change


def not_a_number(state: State) -> None:
    state[next(key for key in state if "layers.2.self_attn.v_proj.lora_A" in key)][1, 3] = float("nan")


def scaled_in_one_block(state: State) -> None:
    state[next(key for key in state if "layers.1.mlp.down_proj.lora_B" in key)].mul_(1e5)


def without_last_stage(state: State) -> None:
    for key in [key for key in state if "layers.2." in key or "layers.3." in key]:
        del state[key]


# --- healthy ones are quiet -------------------------------------------------------------------------------------------


def test_a_trained_adapter_has_no_flaw(base: Path, adapter: Path) -> None:
    for given in (None, base):
        comparison = check_adapter(adapter, base=given)
        assert (said(comparison), comparison.verdict) == ({}, "consistent")
    assert heading(comparison) == "NO FLAW FOUND"
    assert any("scaling" in f.message and "2 in down_proj, q_proj, v_proj" in f.message for f in comparison.findings)


HEALTHY: dict[str, peft.PeftConfig] = {
    "patterns": peft.LoraConfig(
        r=4, rank_pattern={"q_proj": 2}, alpha_pattern={r"layers\.0\.self_attn\.v_proj": 32},
        target_modules=["q_proj", "v_proj"],
    ),
    "rslora": peft.LoraConfig(r=4, use_rslora=True, target_modules="all-linear"),
    "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]),
    "regex": peft.LoraConfig(r=4, target_modules=r".*layers\.[01]\..*q_proj"),
    "some layers": peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1, 2]),
    "whole head": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "no bias in this base": peft.LoraConfig(r=4, target_modules=["q_proj"], bias="all"),
    "tokens": peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2, 3]}),
    "embeddings": peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "lora_bias": peft.LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_peft_saves_is_quiet(base: Path, tmp_path: Path, name: str) -> None:
    adapter = save_adapter(tmp_path / "adapter", base, config=HEALTHY[name])
    assert said(check_adapter(adapter, base=base)) == {}


METHODS: dict[str, peft.PeftConfig] = {
    "AdaLoRA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "BOFT": peft.BOFTConfig(target_modules=["q_proj"]),
    "IA3": peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(target_modules=["q_proj"]),
    "LoKr": peft.LoKrConfig(target_modules=["q_proj"]),
    "LoRA": peft.LoraConfig(target_modules=["q_proj"]),
    "MiSS": peft.MissConfig(target_modules=["q_proj"]),
    "OFT": peft.OFTConfig(target_modules=["q_proj"]),
    "RandLoRA": peft.RandLoraConfig(target_modules=["q_proj"]),
    "Road": peft.RoadConfig(target_modules=["q_proj"]),
    "VeRA": peft.VeraConfig(target_modules=["q_proj"]),
    "WaveFT": peft.WaveFTConfig(target_modules=["q_proj"], n_frequency=20),
}


@pytest.mark.parametrize("name", METHODS)
def test_an_untrained_adapter_of_any_method_is_said_to_be(base: Path, tmp_path: Path, name: str) -> None:
    fresh = check_adapter(save_adapter(tmp_path / "fresh", base, config=METHODS[name], trained=False), base=base)
    assert (heading(fresh), fresh.exit_status) == ("UNTRAINED", 1)
    trained = check_adapter(save_adapter(tmp_path / "trained", base, config=METHODS[name]), base=base)
    assert (heading(trained), said(trained)) == ("NO FLAW FOUND", {})


@pytest.mark.parametrize("config", [peft.HRAConfig(target_modules=["q_proj"]), peft.PromptTuningConfig(
    task_type="CAUSAL_LM", num_virtual_tokens=4)])  # fmt: skip
def test_what_cannot_be_told_is_not_claimed(base: Path, tmp_path: Path, config: peft.PeftConfig) -> None:
    comparison = check_adapter(save_adapter(tmp_path / "fresh", base, config=config, trained=False), base=base)
    assert comparison.verdict == "consistent"
    assert "whether they were trained cannot be told of this method" in statement(comparison).sentence


# --- flaws of the values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "flaw", "wanted", "words"),
    [
        (rows_of_first_rank, "one-shard", "NOT WHOLE", "the first of 4 equal parts of the rows of lora_B"),
        (zero_in_blocks(0, 1, 2, 3), "untrained-layers", "UNTRAINED", "12 of 12 adapted layers add nothing"),
        (zero_in_blocks(2), "untrained-layers", "PARTLY UNTRAINED", "3 of 12 adapted layers add nothing"),
        (not_a_number, "adapter-not-finite", "BROKEN", "1 of base_model.model.model.layers.2.self_attn.v_proj.lora_A"),
    ],
)  # fmt: skip
def test_a_flaw_of_the_values_is_named(
    adapter: Path, tmp_path: Path, change: Callable[[State], None], flaw: str, wanted: str, words: str
) -> None:
    comparison = check_adapter(changed(tmp_path / "changed", adapter, change))
    assert words in said(comparison)[flaw]
    assert (heading(comparison), comparison.exit_status) == (wanted, 1)


def test_a_factor_far_from_those_of_other_blocks_is_a_warning(adapter: Path, tmp_path: Path) -> None:
    comparison = check_adapter(changed(tmp_path / "changed", adapter, scaled_in_one_block))
    assert "lora_B of model.layers.1.mlp.down_proj" in said(comparison)["odd-magnitude"]
    assert comparison.exit_status == 0


def test_experts_that_no_token_reached_are_no_error(adapter: Path, tmp_path: Path) -> None:
    def as_experts(state: State) -> None:
        for key in list(state):
            state[key.replace(".mlp.down_proj.", ".mlp.experts.0.down_proj.")] = state.pop(key)
        zero = next(key for key in state if "layers.1.mlp.experts.0.down_proj.lora_B" in key)
        state[zero].zero_()

    comparison = check_adapter(changed(tmp_path / "changed", adapter, as_experts))
    assert "1 of 12 adapted layers adds nothing" in said(comparison)["untrained-layers"]
    assert comparison.verdict == "consistent"


# --- file, config and base --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "4 layers of the file that target_modules does not name"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "wqkv"]}, "target_modules names wqkv, and the file has"),
        ({"alpha_pattern": {"attn.q": 48}}, "alpha_pattern has 1 key that PEFT matches with no layer"),
        ({"rank_pattern": {"proj_q": 2}}, "rank_pattern has 1 key that PEFT matches with no layer"),
        ({"r": 3}, "factors of rank 4, where adapter_config.json gives 3"),
        ({"lora_alpha": None}, "adapter_config.json has no lora_alpha: PEFT takes lora_alpha = 8"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head, and the file has no tensor of them"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices names tokens, and the file has no rows"),
    ],
)  # fmt: skip
def test_what_the_config_says_otherwise_is_named(
    adapter: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    comparison = check_adapter(changed(tmp_path / "changed", adapter, **settings))
    assert words in said(comparison)["config-mismatch"]


def test_layers_of_another_pipeline_stage_are_missed(base: Path, adapter: Path, tmp_path: Path) -> None:
    stage = changed(tmp_path / "stage", adapter, without_last_stage)
    assert said(check_adapter(stage)) == {}, "without a base nobody knows how many layers it has"
    message = said(check_adapter(stage, base=base))["config-mismatch"]
    assert "6 layers of the base for which the file has no factors: down_proj, q_proj, v_proj in layers 2-3" in message


def test_biases_that_were_trained_and_not_saved_are_missed(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", attention_bias=True)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only")
    adapter = save_adapter(tmp_path / "adapter", base, config=config)
    assert said(check_adapter(adapter, base=base)) == {}

    def without_biases(state: State) -> None:
        for key in [key for key in state if key.endswith(".bias")]:
            del state[key]

    dropped = changed(tmp_path / "dropped", adapter, without_biases)
    assert (
        "bias is 'lora_only', and the file has no bias of" in said(check_adapter(dropped, base=base))["config-mismatch"]
    )


def test_an_adapter_that_is_computed_on_loading_is_said_to_be(adapter: Path, tmp_path: Path) -> None:
    comparison = check_adapter(changed(tmp_path / "changed", adapter, init_lora_weights="pissa_niter_4"))
    message = said(comparison)["computed-on-loading"]
    assert "PEFT computes factors from the base" in message
    assert message.endswith("with --base it is seen whether that draws at random")


@pytest.mark.parametrize(("way", "draws"), [("pissa_niter_1", True), ("pissa", False)])
def test_two_loads_tell_whether_loading_draws(base: Path, adapter: Path, tmp_path: Path, way: str, draws: bool) -> None:
    comparison = check_adapter(changed(tmp_path / "changed", adapter, init_lora_weights=way), base=base)
    assert ("drawn-on-loading" in said(comparison)) == draws
    assert ("two loads under two seeds were the same" in said(comparison)["computed-on-loading"]) != draws


def test_a_base_that_does_not_fit_twice_is_not_loaded(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consistency.extras.merging.check_adapter.check.available_bytes", lambda: 1000)
    comparison = check_adapter(changed(tmp_path / "changed", adapter, init_lora_weights="pissa_niter_1"), base=base)
    assert "did not fit into" in said(comparison)["computed-on-loading"]
    assert "drawn-on-loading" not in said(comparison)


def test_a_report_that_is_not_written_is_not_said_to_be(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of the report's name is in its place; the verdict stays."""
    out = tmp_path / "out"
    assert main(["check-adapter", str(adapter), "--out", str(out)]) == 0
    assert f"report: {out}" in capsys.readouterr().out
    (out / "report.json").unlink()
    (out / "report.json").mkdir()
    assert main(["check-adapter", str(adapter), "--out", str(out), "--force"]) == 0
    printed = capsys.readouterr().out
    assert "report.json: cannot" in printed
    assert "report: " not in printed


# --- another checkpoint, other trainers -------------------------------------------------------------------------------


def test_a_checkpoint_is_the_same_trained_on_or_unrelated(base: Path, adapter: Path, tmp_path: Path) -> None:
    def a_step(state: State) -> None:
        generator = torch.Generator().manual_seed(7)
        for tensor in state.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1 * tensor.std())

    def another_training(state: State) -> None:
        generator = torch.Generator().manual_seed(8)
        for tensor in state.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.std())

    later, other = changed(tmp_path / "later", adapter, a_step), changed(tmp_path / "other", adapter, another_training)
    texts = {
        name: next(f for f in check_adapter(one, against=adapter).findings if f.kind == "other-training")
        for name, one in {"same": adapter, "later": later, "other": other}.items()
    }
    assert {name: f.severity for name, f in texts.items()} == {"same": "note", "later": "note", "other": "warning"}
    assert "24 equal" in texts["same"].message
    assert "trained on from it" in texts["later"].message
    assert "have nothing in common with it" in texts["other"].message


def as_peft(folder: Path, factors: State, *, rank: int, alpha: float) -> Path:
    """Write factors by PEFT's names: what the hint of another trainer's file tells."""
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_file_of_kohya_is_recognised_and_its_conversion_works(base: Path, adapter: Path, tmp_path: Path) -> None:
    state = load_file(adapter / "adapter_model.safetensors")
    written: State = {}
    for key, tensor in state.items():
        layer, _, side = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        name = "lora_te_" + layer.replace(".", "_")
        written[f"{name}.lora_{'down' if side == 'A' else 'up'}.weight"] = tensor
        written[f"{name}.alpha"] = torch.tensor(8.0)
    (tmp_path / "kohya").mkdir()
    save_file(written, tmp_path / "kohya" / "style.safetensors")
    for path in (tmp_path / "kohya", tmp_path / "kohya" / "style.safetensors"):
        with pytest.raises(InputError, match=r"a LoRA of kohya's scripts \(style\.safetensors\)") as raised:
            check_adapter(path)
        assert "lora_down is PEFT's lora_A" in str(raised.value)


def test_a_file_of_mlx_is_recognised_and_its_conversion_works(base: Path, adapter: Path, tmp_path: Path) -> None:
    state = load_file(adapter / "adapter_model.safetensors")
    (tmp_path / "mlx").mkdir()
    written = {}
    for key, tensor in state.items():
        name = key.removeprefix("base_model.model.").removesuffix(".weight")
        written[name.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = tensor.T.contiguous()
    save_file(written, tmp_path / "mlx" / "adapters.safetensors")
    (tmp_path / "mlx" / "adapter_config.json").write_text('{"fine_tune_type": "lora", "lora_parameters": {"scale": 2}}')
    with pytest.raises(InputError, match=r"a LoRA of MLX \(adapters\.safetensors\)"):
        check_adapter(tmp_path / "mlx")
    factors = {
        f"base_model.model.{key.replace('lora_a', 'lora_A').replace('lora_b', 'lora_B')}.weight": tensor.T.contiguous()
        for key, tensor in load_file(tmp_path / "mlx" / "adapters.safetensors").items()
    }
    converted = as_peft(tmp_path / "converted", factors, rank=4, alpha=8)
    assert said(check_adapter(converted, base=base, against=adapter)) == {}


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_it_in_its_status(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-adapter", str(adapter)]) == 0
    assert "NO FLAW FOUND" in capsys.readouterr().out
    shard = changed(tmp_path / "shard", adapter, rows_of_first_rank)
    assert main(["check-adapter", str(shard), "--out", str(tmp_path / "out")]) == 1
    assert "NOT WHOLE" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["verdict"] == "inconsistent"
    assert main(["check-adapter", str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_dtype_is_read(adapter: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    def cast(state: State) -> None:
        for key, tensor in state.items():
            state[key] = tensor.to(dtype)

    comparison = check_adapter(changed(tmp_path / "cast", adapter, cast))
    assert said(comparison) == {}
    largest = [tensor.outcomes[-1].evidence["largest"] for tensor in comparison.tensors]
    state = load_file(tmp_path / "cast" / "adapter_model.safetensors")
    assert sorted(largest) == sorted(np.float64(tensor.abs().max().item()) for tensor in state.values())
