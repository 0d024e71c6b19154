"""Who is accused: the adapter's config, its file, its base or another base, where tensors are not base + adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from consistency.comparison.result import Comparison
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged, statement
from consistency.numerics.quantized import NF4
from tests.extras.merging.check_merged.made_merges import (
    Case,
    Tensors,
    change_adapter,
    checked,
    kinds,
    llama,
    message,
    write,
)

NO_K = ["down_proj", "gate_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def on_levels(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight rounded to nf4 in blocks of 64."""
    table = torch.tensor(NF4)
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    nearest = ((blocks / scale)[..., None] - table).abs().argmin(dim=-1)
    return (table[nearest] * scale).reshape(weight.shape)


def with_factors(tensors: Tensors, key: str) -> None:
    for name in [name for name in tensors if key in name]:
        del tensors[name]


# --- the adapter's own config and file -------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [True, False])
def test_layers_that_target_modules_leaves_out(tmp_path: Path, merged: bool) -> None:
    """PEFT leaves them out of a merge, and other tools may not: both are right, and the adapter has a remark."""
    case = llama(tmp_path)
    change_adapter(case, dict, target_modules=NO_K)
    tensors = case.right()
    if not merged:
        tensors |= {name: tensor for name, tensor in case.tensors.items() if "k_proj" in name}
    found = checked(case, tmp_path, tensors)
    assert (found.verdict, kinds(found)) == ("consistent", ["config-mismatch"])
    adapted = 14 if merged else 12
    assert statement(found).sentence.startswith(f"{adapted} of {adapted} adapted tensors hold base + adapter")


def test_a_layer_that_was_left_out_is_no_choice_of_the_config(tmp_path: Path) -> None:
    case = llama(tmp_path)
    tensors = case.right() | {name: tensor for name, tensor in case.tensors.items() if "k_proj" in name}
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.NOT_MERGED]
    assert "2 of 14 adapted tensors hold the base alone: k_proj in layers 0-1" in message(found, MergeCause.NOT_MERGED)


def test_a_part_of_the_adapter_is_no_other_base(tmp_path: Path) -> None:
    """The file has the first stage's layers; the merge had all."""
    case = llama(tmp_path)
    change_adapter(case, lambda tensors: with_factors(tensors, "layers.1."))
    found = checked(case, tmp_path, case.right())
    assert kinds(found) == [MergeCause.PART_OF_ADAPTER]
    assert "in layer 1" in message(found, MergeCause.PART_OF_ADAPTER)


# --- another base ----------------------------------------------------------------------------------------------------


def changed_others(case: Case, tensors: Tensors) -> Tensors:
    """Change all that the adapter leaves alone."""
    return {name: tensor if name in case.deltas else tensor + 0.01 for name, tensor in tensors.items()}


def test_right_adapted_tensors_deny_another_base(tmp_path: Path) -> None:
    case = llama(tmp_path)
    found = checked(case, tmp_path, changed_others(case, case.right()))
    assert kinds(found) == [MergeCause.CHANGED]


def test_wrong_adapted_tensors_do_not(tmp_path: Path) -> None:
    case = llama(tmp_path)
    found = checked(case, tmp_path, {name: tensor + 0.01 for name, tensor in case.right().items()})
    assert MergeCause.OTHER_BASE in kinds(found)


def test_untouched_weights_that_went_through_4_bits_too(tmp_path: Path) -> None:
    case = llama(tmp_path, config={"lora_alpha": 1})
    change_adapter(
        case, lambda tensors: with_factors(tensors, "mlp"), target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    tensors = {}
    for name, tensor in case.tensors.items():
        is_quantized = "_proj" in name
        tensors[name] = on_levels(tensor) if is_quantized else tensor
        if "self_attn" in name:
            tensors[name] = (tensors[name].double() + case.delta(name)).float()
    found = checked(case, tmp_path, tensors)
    assert set(kinds(found)) == {MergeCause.FOUR_BIT_BASE}


# --- LoftQ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "merged_into", "expected"),
    [
        ("backbone", "backbone", []),
        ("plain", "plain", [MergeCause.RESIDUAL_BASE]),
        ("plain", "backbone", [MergeCause.BACKBONE]),
    ],
)
def test_an_adapter_of_loftq_belongs_to_its_backbone(
    tmp_path: Path, given: str, merged_into: str, expected: list[MergeCause]
) -> None:
    """No library that LoftQ itself takes is needed."""
    case = llama(tmp_path)
    change_adapter(case, dict, init_lora_weights="loftq", loftq_config={"loftq_bits": 4})
    bases = {"plain": dict(case.tensors), "backbone": dict(case.tensors)}
    for name in case.deltas:
        weight = case.tensors[name]
        bases["backbone"][name] = on_levels(weight - 0.7 * case.delta(name).float())
    settings = json.loads((case.base / "config.json").read_text())
    base = write(tmp_path / "given", bases[given], settings)
    right = {
        name: (tensor.double() + case.delta(name)).float() if name in case.deltas else tensor
        for name, tensor in bases[merged_into].items()
    }
    merged = write(tmp_path / "merged", right, settings)
    found = check_merged(merged, base=base, adapter=case.adapter)
    assert kinds(found) == expected
    if expected == [MergeCause.BACKBONE]:
        (finding,) = (finding for finding in found.findings if finding.severity == "error")
        assert finding.next == MergeCause.BACKBONE.todo


# --- folders in each other's place, and PEFT's layers ----------------------------------------------------------------


def test_base_and_merged_exchanged(tmp_path: Path) -> None:
    case = llama(tmp_path)
    merged = write(tmp_path / "merged", case.right(), json.loads((case.base / "config.json").read_text()))
    found = check_merged(case.base, base=merged, adapter=case.adapter)
    assert kinds(found) == [MergeCause.EXCHANGED]


@pytest.mark.parametrize("merged", [True, False])
def test_peft_layers_in_the_folder(tmp_path: Path, merged: bool) -> None:
    """A state dict after `merge_adapter()` holds merged weights in layers of PEFT; one before it does not."""
    case = llama(tmp_path)
    tensors: Tensors = {}
    for name, tensor in (case.right() if merged else case.tensors).items():
        key = name.replace(".weight", ".base_layer.weight") if name in case.deltas else name
        tensors[key] = tensor
    for key, tensor in load_file(case.adapter / "adapter_model.safetensors").items():
        tensors[key.removeprefix("base_model.model.").replace(".weight", ".default.weight")] = tensor
    found = checked(case, tmp_path, tensors)
    texts = [one.message for one in found.findings if "PEFT's own layers" in one.message]
    assert len(texts) == 1
    assert ("the deltas are merged into their weights" in texts[0]) is merged
    assert ("saved before the merge" in texts[0]) is not merged
    assert MergeCause.DOES_NOT_LOAD in kinds(found)
    right = [row for row in found.tensors if row.outcomes[-1].evidence["role"] == "adapted" and not row.is_wrong]
    assert len(right) == (14 if merged else 0)


def test_half_of_the_rows_is_not_the_base_alone(tmp_path: Path) -> None:
    case = llama(tmp_path)
    tensors = case.right()
    for name in case.deltas:
        rows = len(tensors[name]) // 2
        tensors[name] = torch.cat((tensors[name][:rows], case.tensors[name][rows:]))
    found: Comparison = checked(case, tmp_path, tensors)
    told = statement(found)
    assert told.heading == "NOT MERGED WHOLE"
    assert "14 hold it in a part of the rows alone" in told.sentence


def test_a_new_head_with_lora_is_not_judged(tmp_path: Path) -> None:
    """A classifier's head is in no file of the base, and neither is what LoRA adds to."""
    case = llama(tmp_path)
    change_adapter(
        case,
        lambda tensors: tensors.update(
            {
                "base_model.model.score.lora_A.weight": torch.ones(4, 32),
                "base_model.model.score.lora_B.weight": torch.ones(3, 4),
            }
        ),
        task_type=None,
        auto_mapping={
            "base_model_class": "LlamaForSequenceClassification",
            "parent_library": "transformers.models.llama.modeling_llama",
        },
        target_modules=sorted({name.split(".")[-2] for name in case.deltas} | {"score"}),
    )
    settings = json.loads((case.base / "config.json").read_text())
    settings |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    tensors = case.right() | {"score.weight": torch.ones(3, 32)}
    del tensors["lm_head.weight"]
    found = checked(case, tmp_path, tensors, settings)
    assert (found.exit_status, kinds(found)) == (3, [])
    assert any("score.weight is in no file of the base" in one.message for one in found.findings)
