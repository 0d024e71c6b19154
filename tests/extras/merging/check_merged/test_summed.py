"""Several adapters in one folder, merged by PEFT: at once, or one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import zoo
from consistency.cli.main import main
from consistency.errors import InputError, UsageError
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged
from tests.extras.merging.check_merged.made_merges import kinds, message

Merge = Callable[[Path, torch.dtype], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base and adapters of it."""
    zoo.quiet()
    folder = tmp_path_factory.mktemp("summed")
    zoo.save_model("llama", folder / "base")
    for seed, (name, settings) in enumerate(
        {
            "sft": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
            "dpo": {"r": 6, "target_modules": ["v_proj", "down_proj"]},
            "rank3": {"r": 3, "target_modules": ["v_proj"]},
            "dora": {"r": 4, "target_modules": ["v_proj"], "use_dora": True},
        }.items()
    ):
        torch.manual_seed(seed)
        config = peft.LoraConfig(lora_alpha=7, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        peft.get_peft_model(load(folder), config).save_pretrained(folder / name)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)


def in_turn(*names: str) -> Merge:
    def merge(folder: Path, dtype: torch.dtype) -> Any:
        model = load(folder, dtype)
        for name in names:
            model = peft.PeftModel.from_pretrained(model, str(folder / name)).merge_and_unload()
        return model

    return merge


def at_once(folder: Path, dtype: torch.dtype) -> Any:
    model = peft.PeftModel.from_pretrained(load(folder, dtype), str(folder / "sft"), adapter_name="sft")
    model.load_adapter(str(folder / "dpo"), "dpo")
    return model.merge_and_unload(adapter_names=["sft", "dpo"])


def weighted(folder: Path, dtype: torch.dtype) -> Any:
    model = peft.PeftModel.from_pretrained(load(folder, dtype), str(folder / "rank3"), adapter_name="one")
    model.load_adapter(str(folder / "rank3"), "two")
    model.add_weighted_adapter(["one", "two"], [0.75, 0.5], "both", combination_type="cat")
    model.set_adapter("both")
    return model.merge_and_unload(adapter_names=["both"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("merge", [in_turn("sft", "dpo"), in_turn("dpo", "sft"), at_once])
def test_the_sum_of_two_is_right(made: Path, tmp_path: Path, merge: Merge, dtype: torch.dtype) -> None:
    merge(made, dtype).save_pretrained(tmp_path)
    found = check_merged(tmp_path, base=made / "base", adapter=[made / "sft", made / "dpo"])
    assert (found.verdict, kinds(found)) == ("consistent", [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_three_is_right(made: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    in_turn("rank3", "sft", "dpo")(made, dtype).save_pretrained(tmp_path)
    found = check_merged(tmp_path, base=made / "base", adapter=[made / name for name in ("sft", "dpo", "rank3")])
    assert (found.verdict, kinds(found)) == ("consistent", [])


def test_a_weighted_sum(made: Path, tmp_path: Path) -> None:
    weighted(made, torch.float32).save_pretrained(tmp_path)
    adapters = [made / "rank3"] * 2
    right = check_merged(tmp_path, base=made / "base", adapter=adapters, weights=[0.75, 0.5])
    assert (right.verdict, kinds(right)) == ("consistent", [])
    assert check_merged(tmp_path, base=made / "base", adapter=adapters).verdict == "inconsistent"
    with pytest.raises(UsageError, match="not as many weights"):
        check_merged(tmp_path, base=made / "base", adapter=adapters, weights=[1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_that_is_left_out_is_named(made: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    in_turn("dpo")(made, dtype).save_pretrained(tmp_path)
    found = check_merged(tmp_path, base=made / "base", adapter=[made / "rank3", made / "dpo"])
    assert kinds(found) == [MergeCause.ADAPTER_LEFT_OUT]
    assert "rank3 is left out" in message(found, MergeCause.ADAPTER_LEFT_OUT)


def test_one_wrong_element_of_a_sum_is_found(made: Path, tmp_path: Path) -> None:
    model = in_turn("sft", "dpo")(made, torch.bfloat16)
    weight = model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(torch.inf, dtype=torch.bfloat16))
    model.save_pretrained(tmp_path)
    found = check_merged(tmp_path, base=made / "base", adapter=[made / "sft", made / "dpo"])
    (row,) = (one for one in found.tensors if one.is_wrong)
    assert (row.layer, row.outcomes[-1].mismatched) == ("model.layers.0.self_attn.v_proj", 1)


def test_a_method_without_a_sum_is_refused(made: Path, tmp_path: Path) -> None:
    in_turn("sft", "dora")(made, torch.float32).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="these adapters have no sum") as refused:
        check_merged(tmp_path, base=made / "base", adapter=[made / "sft", made / "dora"])
    assert "dora does not add to it" in str(refused.value)
    assert "check the last one alone" in str(refused.value)


def test_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_turn("sft", "dpo")(made, torch.float32).save_pretrained(tmp_path)
    base = ["check-merged", str(tmp_path), "--base", str(made / "base")]
    both = ["--adapter", str(made / "sft"), "--adapter", str(made / "dpo")]
    assert main([*base, *both]) == 0
    assert "MERGED   " in capsys.readouterr().out
    assert main([*base, *both, "--weight", "1", "--weight", "0.5"]) == 1
