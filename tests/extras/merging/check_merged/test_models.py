"""Merges by PEFT of every method, a mixture of experts and a model of vision and language, and their mistakes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks import zoo
from consistency.comparison.result import Comparison
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged
from tests.extras.merging.check_merged.made_merges import kinds, message

UNMERGED = frozenset({"ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING",
                      "PROMPT_TUNING", "SHADOW", "XLORA", "BEFT", "LILY", "POLY", "ADAMSS"})  # fmt: skip
"""Methods that change no weight; that PEFT does not merge, or not without biases; that need scikit-learn."""


@dataclass(frozen=True)
class Trained:
    """A tiny model of the zoo with an adapter, and its merge by PEFT."""

    base: Path
    adapter: Path
    model: type[Any]
    folder: Path

    def merge(self, dtype: torch.dtype = torch.float32, *, safe: bool = False) -> Path:
        out = self.folder / "merged"
        shutil.rmtree(out, ignore_errors=True)
        loaded = self.model.from_pretrained(self.base, dtype=dtype)
        merged = peft.PeftModel.from_pretrained(loaded, str(self.adapter)).merge_and_unload(safe_merge=safe)
        merged.save_pretrained(out)
        return out

    def check(self, merged: Path) -> Comparison:
        return check_merged(merged, base=self.base, adapter=self.adapter)

    def changed(self, change: Any, dtype: torch.dtype = torch.float32) -> Comparison:
        """Check the merge after a change of its tensors, given those and the base's."""
        merged = self.merge(dtype)
        file = merged / "model.safetensors"
        tensors = load_file(file)
        change(tensors, load_file(self.base / "model.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
        return self.check(merged)


def trained(folder: Path, model: str, method: str, variant: str = "", layer: str = "", **fields: object) -> Trained:
    chosen = next(
        one
        for one in zoo.combinations((model,))
        if (one.method, one.variant) == (method, variant) and one.layer in (layer or one.layer)
    )
    made = zoo.save_model(model, folder / "base")
    chosen = zoo.Combination(
        model=model,
        layer=chosen.layer,
        method=method,
        variant=variant,
        targets=chosen.targets,
        fields={**chosen.fields, **fields},
    )
    assert not zoo.save_adapter(chosen, made, folder / "base", folder / "adapter")
    return Trained(base=folder / "base", adapter=folder / "adapter", model=type(made), folder=folder)


@pytest.fixture(autouse=True)
def quiet() -> None:
    zoo.quiet()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("variant", ["", "use_rslora", "use_dora", "modules_to_save", "pissa"])
def test_a_variant_of_lora_is_right(tmp_path: Path, variant: str, safe: bool, dtype: torch.dtype) -> None:
    made = trained(tmp_path, "llama", "LORA", variant)
    found = made.check(made.merge(dtype, safe=safe))
    assert (found.verdict, kinds(found)) == ("consistent", [])


def test_biases_are_right(tmp_path: Path) -> None:
    for method in ("LORA", "IA3"):
        fields: dict[str, Any] = {"lora_bias": True} if method == "LORA" else {}
        made = trained(tmp_path / method, "bert", method, layer="Linear", **fields)
        found = made.check(made.merge(torch.bfloat16))
        assert (found.verdict, kinds(found)) == ("consistent", [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT's methods, about settings and extensions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", sorted(set(zoo.methods()) - UNMERGED))
def test_every_method_that_merges_is_right(tmp_path: Path, method: str, dtype: torch.dtype) -> None:
    made = trained(tmp_path, "llama", method)
    plain, safe = made.merge(dtype), tmp_path / "safe"
    plain.rename(safe)
    folders = [safe, made.merge(dtype, safe=True)]
    for folder in folders:
        found = made.check(folder)
        assert (found.verdict, kinds(found)) == ("consistent", [])


def test_doras_magnitude_is_not_applied(tmp_path: Path) -> None:
    made = trained(tmp_path, "llama", "LORA", "use_dora")
    factors = load_file(made.adapter / "adapter_model.safetensors")

    def without(tensors: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        for name in (one for one in base if "_proj" in one):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{prefix}.lora_A.weight" in factors:
                a, b = (factors[f"{prefix}.lora_{side}.weight"] for side in "AB")
                tensors[name] = base[name] + 2.0 * (b @ a)

    config = peft.PeftConfig.from_pretrained(made.adapter)
    assert config.lora_alpha / config.r == 2.0
    assert kinds(made.changed(without)) == [MergeCause.MAGNITUDE]


def test_dora_whose_change_is_rounded_and_added_again(tmp_path: Path) -> None:
    """axolotl computes the merged layer, rounds what it has more than the base, and adds that to the base."""
    made = in_bfloat16(trained(tmp_path, "llama", "LORA", "use_dora"))
    merged = made.merge(torch.float32)
    file = merged / "model.safetensors"
    right, base = load_file(file), load_file(made.base / "model.safetensors")
    for name, tensor in right.items():
        right[name] = base[name] + (tensor - base[name].float()).bfloat16()
    save_file(right, file, {"format": "pt"})
    found = made.check(merged)
    assert (found.verdict, kinds(found)) == ("consistent", [])


@pytest.mark.parametrize(
    ("scaling", "magnitude", "verdict"),
    [(2.0, 1.0, "consistent"), (2.1, 1.0, "inconsistent"), (2.0, 1.05, "inconsistent"), (2.0, None, "inconsistent")],
    ids=["as MLX fuses", "another scaling", "another magnitude", "no magnitude"],
)
def test_dora_whose_sum_is_rounded_before_the_magnitude(
    tmp_path: Path, scaling: float, magnitude: float | None, verdict: str
) -> None:
    """MLX rounds the delta and the sum to the weight's dtype, takes its norm in it, and saves a float32 product."""
    made = in_bfloat16(trained(tmp_path, "llama", "LORA", "use_dora"))
    merged = made.merge(torch.float32)
    file = merged / "model.safetensors"
    tensors, base = load_file(file), load_file(made.base / "model.safetensors")
    factors = load_file(made.adapter / "adapter_model.safetensors")
    for key in (one for one in factors if one.endswith("lora_A.weight")):
        module = key.removesuffix(".lora_A.weight")
        name = f"{module.removeprefix('base_model.model.')}.weight"
        delta = scaling * (factors[f"{module}.lora_B.weight"] @ factors[key])
        total = base[name] + delta.bfloat16()
        norm = total.square().sum(dim=1).sqrt()
        assert norm.dtype == torch.bfloat16
        factor = factors[f"{module}.lora_magnitude_vector"] / norm
        tensors[name] = total if magnitude is None else magnitude * factor[:, None] * total
    save_file(tensors, file, {"format": "pt"})
    assert made.check(merged).verdict == verdict


def test_a_residual_base_is_needed(tmp_path: Path) -> None:
    made = trained(tmp_path, "llama", "LORA", "pissa")
    factors = load_file(made.adapter / "adapter_model.safetensors")

    def plain(tensors: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        for key in (one for one in factors if one.endswith("lora_A.weight")):
            name = key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            tensors[name] = base[name] + 2.0 * (factors[key.replace("lora_A", "lora_B")] @ factors[key])

    assert kinds(made.changed(plain)) == [MergeCause.RESIDUAL_BASE]


# --- a class of its own -----------------------------------------------------------------------------------------------


def test_a_classifier_on_a_base_for_text_needs_no_head_of_the_base(tmp_path: Path) -> None:
    made = zoo.save_model("llama", tmp_path / "base")
    classes = transformers.AutoModelForSequenceClassification
    base = classes.from_pretrained(tmp_path / "base", num_labels=3, pad_token_id=0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert (type(made).__name__, type(base).__name__) == ("LlamaForCausalLM", "LlamaForSequenceClassification")
    found = check_merged(tmp_path / "merged", base=tmp_path / "base", adapter=tmp_path / "adapter")
    assert (found.verdict, kinds(found)) == ("consistent", [])
    assert "LlamaForSequenceClassification, which has no lm_head.weight" in message(found, MergeCause.OTHER_HEAD)

    settings = tmp_path / "merged" / "config.json"
    settings.write_text(settings.read_text().replace("ForSequenceClassification", "ForCausalLM"))
    loaded_as_text = check_merged(tmp_path / "merged", base=tmp_path / "base", adapter=tmp_path / "adapter")
    assert kinds(loaded_as_text) == [MergeCause.FILES], "what loads as the base's class needs the base's head"


# --- a mixture of experts --------------------------------------------------------------------------------------------


def experts(folder: Path) -> Trained:
    return trained(folder, "mixtral", "LORA", "target_parameters", target_modules=["q_proj"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_right(tmp_path: Path, dtype: torch.dtype) -> None:
    made = experts(tmp_path)
    found = made.check(made.merge(dtype))
    assert (found.verdict, kinds(found)) == ("consistent", [])
    assert any("transformers' names of MixtralForCausalLM" in one.message for one in found.findings)


def in_bfloat16(made: Trained) -> Trained:
    """Store the base in bfloat16, beside the adapter in float32."""
    file, config = made.base / "model.safetensors", made.base / "config.json"
    save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file, {"format": "pt"})
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    return made


@pytest.mark.parametrize("method", ["LORA", "OFT", "LOHA"])
def test_an_adapter_in_float32_beside_a_base_in_bfloat16(tmp_path: Path, method: str) -> None:
    made = in_bfloat16(experts(tmp_path) if method == "LORA" else trained(tmp_path, "llama", method))
    for dtype in (torch.bfloat16, torch.float32):
        found = made.check(made.merge(dtype))
        assert (found.verdict, kinds(found)) == ("consistent", [])


def is_expert(name: str) -> bool:
    return ".experts." in name


def test_experts_are_left_out(tmp_path: Path) -> None:
    found = experts(tmp_path).changed(lambda t, base: t.update({k: v for k, v in base.items() if is_expert(k)}))
    assert kinds(found) == [MergeCause.EXPERTS_LEFT_OUT]


def test_one_expert_is_left_out(tmp_path: Path) -> None:
    found = experts(tmp_path).changed(lambda t, base: t.update({k: v for k, v in base.items() if ".experts.1." in k}))
    assert kinds(found) == [MergeCause.EXPERTS_LEFT_OUT]
    assert "expert 1 holds the base" in message(found, MergeCause.EXPERTS_LEFT_OUT)


def merged_by_other_factors(made: Trained, change: Callable[[torch.Tensor], torch.Tensor]) -> Comparison:
    """Check a merge of other factors B of the experts than the adapter's."""
    file = made.adapter / "adapter_model.safetensors"
    right = load_file(file)
    changed = {key: change(one) if "experts" in key and "lora_B" in key else one for key, one in right.items()}
    save_file({key: one.contiguous() for key, one in changed.items()}, file)
    merged = made.merge()
    save_file(right, file)
    return made.check(merged)


def test_up_and_gate_hold_each_others_delta(tmp_path: Path) -> None:
    def swap(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.roll(len(tensor) // 2, dims=0) if len(tensor) == 4 * zoo.HIDDEN else tensor

    found = merged_by_other_factors(experts(tmp_path), swap)
    assert kinds(found) == [MergeCause.OTHER_PART]
    assert "its halves are swapped" in message(found, MergeCause.OTHER_PART)


def test_the_factors_of_experts_are_read_in_another_order(tmp_path: Path) -> None:
    made = experts(tmp_path)
    rank = peft.PeftConfig.from_pretrained(made.adapter).r

    def slowest(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(len(tensor), rank, -1).transpose(1, 2).reshape(tensor.shape)

    found = merged_by_other_factors(made, slowest)
    assert kinds(found) == [MergeCause.EXPERT_ORDER]
    assert "lora_B with the expert as the slower index" in message(found, MergeCause.EXPERT_ORDER)


# --- vision and language ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left_out", "name"), [("vision_tower", "vision"), ("language_model", "language")])
def test_one_tower_is_left_out(tmp_path: Path, left_out: str, name: str) -> None:
    made = trained(tmp_path, "llava", "LORA")
    assert kinds(made.check(made.merge())) == []
    found = made.changed(lambda t, base: t.update({k: v for k, v in base.items() if left_out in k}))
    assert kinds(found) == [MergeCause.TOWER_LEFT_OUT]
    assert name in message(found, MergeCause.TOWER_LEFT_OUT)


def test_a_folder_with_other_prefixes(tmp_path: Path) -> None:
    made = trained(tmp_path, "llava", "LORA")

    def rename(tensors: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"thinker.{name}"] = tensors.pop(name)

    found = made.changed(rename)
    assert kinds(found) == [MergeCause.DOES_NOT_LOAD], "its own config.json makes no thinker"
    assert all(one.status != "outside" for row in found.tensors for one in row.outcomes)
    assert any("by the prefix thinker. for " in one.message for one in found.findings), found.findings
