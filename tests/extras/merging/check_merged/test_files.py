"""Folders whose files or names are not as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from consistency.comparison.result import Comparison
from consistency.errors import InputError
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.difference import difference
from consistency.extras.merging.check_merged.result import check_merged
from tests.extras.merging.check_merged.made_merges import (
    Case,
    Tensors,
    change_adapter,
    checked,
    kinds,
    llama,
    message,
    random,
    save,
    write,
)


def shards(case: Case, folder: Path, parts: Mapping[str, Tensors], index: Mapping[str, str] | None = None) -> Path:
    """Write shards, with an index where one is given."""
    folder.mkdir()
    for name, tensors in parts.items():
        save_file({key: one.contiguous() for key, one in tensors.items()}, folder / name, {"format": "pt"})
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_bytes((case.base / "config.json").read_bytes())
    return folder


def halves(tensors: Tensors) -> dict[str, Tensors]:
    names = sorted(tensors)
    middle = len(names) // 2
    return {
        f"model-0000{n}-of-00002.safetensors": {name: tensors[name] for name in part}
        for n, part in ((1, names[:middle]), (2, names[middle:]))
    }


def index_of(parts: Mapping[str, Tensors]) -> dict[str, str]:
    return {name: file for file, tensors in parts.items() for name in tensors}


def check(case: Case, merged: Path) -> Comparison:
    return check_merged(merged, base=case.base, adapter=case.adapter)


def test_shards_with_an_index(tmp_path: Path) -> None:
    case = llama(tmp_path)
    parts = halves(case.right())
    found = check(case, shards(case, tmp_path / "m", parts, index_of(parts)))
    assert (found.verdict, kinds(found)) == ("consistent", [])


def test_no_index(tmp_path: Path) -> None:
    case = llama(tmp_path)
    found = check(case, shards(case, tmp_path / "m", halves(case.right())))
    assert kinds(found) == [MergeCause.FILES]
    assert "2 shards and no model.safetensors.index.json" in message(found, MergeCause.FILES)


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    case = llama(tmp_path)
    parts = halves(case.right())
    index = index_of(parts)
    lost = parts.pop("model-00002-of-00002.safetensors")
    found = check(case, shards(case, tmp_path / "m", parts, index))
    messages = [one.message for one in found.findings if one.kind == MergeCause.FILES]
    assert "1 file that the folder lacks: model-00002-of-00002.safetensors" in messages[0]
    assert messages[1].startswith(f"the folder lacks {len(lost)} tensors of the base")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    case = llama(tmp_path)
    parts = halves(case.right())
    index = index_of(parts)
    parts["model-00002-of-00002.safetensors"]["lm_head.weight"] = case.tensors["lm_head.weight"] * 2
    found = check(case, shards(case, tmp_path / "m", parts, index))
    assert kinds(found) == [MergeCause.FILES]
    assert "1 tensor in two shards: lm_head.weight" in message(found, MergeCause.FILES)


def test_a_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    case = llama(tmp_path)
    parts = halves(case.right())
    index = index_of(parts)
    first, second = parts
    listed = {name: file for name, file in index.items() if file == first}
    found = check(case, shards(case, tmp_path / "m", parts, listed))
    messages = [one.message for one in found.findings if one.kind == MergeCause.FILES]
    assert any(f"{second} holds {len(parts[second])} tensors that the index does not name" in text for text in messages)
    assert found.verdict == "inconsistent"


def test_a_set_of_shards_that_is_stale(tmp_path: Path) -> None:
    case = llama(tmp_path)
    parts = {"model.safetensors": case.right(), **halves(case.tensors)}
    found = check(case, shards(case, tmp_path / "m", parts))
    assert (found.verdict, kinds(found)) == ("consistent", [MergeCause.FILES])
    assert "transformers does not read model-00001-of-00002.safetensors" in message(found, MergeCause.FILES)


def test_the_adapter_beside_its_merge(tmp_path: Path) -> None:
    case = llama(tmp_path)
    merged = shards(case, tmp_path / "m", {"model.safetensors": case.right()})
    (merged / "adapter_config.json").write_bytes((case.adapter / "adapter_config.json").read_bytes())
    found = check(case, merged)
    assert (found.verdict, kinds(found)) == ("inconsistent", [MergeCause.ADAPTER_BESIDE])


def test_the_adapter_alone_was_saved(tmp_path: Path) -> None:
    case = llama(tmp_path)
    with pytest.raises(InputError, match="holds no weights of a model"):
        check(case, case.adapter)


def test_missing_and_extra_tensors(tmp_path: Path) -> None:
    case = llama(tmp_path)
    tensors = case.right()
    tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = tensors.pop("model.norm.weight")
    found = checked(case, tmp_path, tensors)
    messages = [one.message for one in found.findings if one.kind == MergeCause.FILES]
    assert any("is a name of PEFT's own layers" in text for text in messages)
    assert "the folder lacks 1 tensor of the base: model.norm.weight" in messages
    assert any("1 tensor that neither base nor adapter has" in text for text in messages)


def test_a_fused_projection(tmp_path: Path) -> None:
    case = llama(tmp_path)
    tensors = case.right()
    for n in range(2):
        attention, mlp = f"model.layers.{n}.self_attn.", f"model.layers.{n}.mlp."
        tensors[f"{attention}qkv_proj.weight"] = torch.cat([tensors.pop(f"{attention}{x}_proj.weight") for x in "qkv"])
        tensors[f"{mlp}gate_up_proj.weight"] = torch.cat([tensors.pop(f"{mlp}{x}_proj.weight") for x in ("gate", "up")])
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.DOES_NOT_LOAD], "transformers' Llama has no such weights"
    assert all(one.status != "outside" for row in found.tensors for one in row.outcomes)
    assert any("as parts of gate_up_proj, qkv_proj" in one.message for one in found.findings)


def test_a_pickle_only_where_it_is_allowed(tmp_path: Path) -> None:
    case = llama(tmp_path)
    merged = tmp_path / "m"
    merged.mkdir()
    torch.save(case.right(), merged / "pytorch_model.bin")
    (merged / "config.json").write_bytes((case.base / "config.json").read_bytes())
    with pytest.raises(InputError, match="pickle"):
        check(case, merged)
    assert check_merged(merged, base=case.base, adapter=case.adapter, allow_pickle=True).verdict == "consistent"


def test_an_adapter_as_the_base(tmp_path: Path) -> None:
    case = llama(tmp_path)
    with pytest.raises(InputError, match="swapped"):
        check_merged(case.base, base=case.adapter, adapter=case.base)


# --- without an adapter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_which_adapter_is_in_here(tmp_path: Path, dtype: torch.dtype) -> None:
    case = llama(tmp_path)
    merged = shards(case, tmp_path / "m", {"model.safetensors": case.right(dtype)})
    found = check_merged(merged, base=case.base)
    assert (found.verdict, found.exit_status) == ("consistent", 0)
    (text,) = (one.message for one in found.findings if "rank 4" in one.message)
    assert text.startswith("14 tensors by rank 4")
    assert "in layers 0-1" in text
    assert "q_proj" in text


def test_ranks_and_full_differences() -> None:
    made = random({"w": (200, 300), "b": (200, 7), "a": (7, 300), "full": (200, 300)}, seed=5)
    for dtype in (torch.float32, torch.bfloat16):
        base = made["w"].to(dtype)
        assert difference((base.float() + made["b"] @ made["a"]).to(dtype), base).rank == 7
        assert difference((base.float() + made["full"]).to(dtype), base).rank is None
    assert difference(made["w"][0] + 1, made["w"][0]).rank is None


# --- models of diffusers ----------------------------------------------------------------------------------------------


def of_diffusers(folder: Path) -> Path:
    """Return a folder as diffusers saves a UNet: by the names of its files, and its config."""
    (folder / "model.safetensors").rename(folder / "diffusion_pytorch_model.safetensors")
    settings = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.42.1"}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def unet(folder: Path) -> Case:
    tensors = random({f"down_blocks.{n}.attn1.to_q.weight": (16, 16) for n in range(2)})
    tensors |= random({"conv_in.weight": (16, 4, 3, 3)})
    return save(folder, tensors, {}, [name for name in tensors if "to_q" in name])


@pytest.mark.parametrize(("times", "expected"), [(1, []), (2, [MergeCause.TWICE])])
def test_a_unet_of_diffusers_is_read_without_its_model(tmp_path: Path, times: int, expected: list[MergeCause]) -> None:
    case = unet(tmp_path)
    tensors = dict(case.tensors)
    for name in case.deltas:
        tensors[name] = (tensors[name].double() + times * case.delta(name)).float()
    merged = of_diffusers(write(tmp_path / "merged", tensors))
    of_diffusers(case.base)
    assert kinds(check_merged(merged, base=case.base, adapter=case.adapter)) == expected


def with_convolution(case: Case, **config: object) -> tuple[Case, torch.Tensor]:
    """Give an adapter a LoRA on a convolution too; return its delta as PEFT convolves the factors."""
    factors = random({"lora_A": (4, 4, 3, 3), "lora_B": (16, 4, 1, 1)}, seed=3)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for part, tensor in factors.items():
            tensors[f"base_model.model.conv_in.{part}.weight"] = tensor

    change_adapter(case, add, target_modules=["to_q", "conv_in"], **config)
    delta = torch.nn.functional.conv2d(factors["lora_A"].transpose(0, 1).double(), factors["lora_B"].double())
    return case, 4 * delta.transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("times", "expected"),
    [(1.0, []), (2.0, [MergeCause.TWICE]), (0.0, [MergeCause.TOWER_LEFT_OUT]), (0.25, [MergeCause.WRONG_SCALE])],
)
def test_a_lora_on_a_convolution_of_a_unet(
    tmp_path: Path, dtype: torch.dtype, times: float, expected: list[MergeCause]
) -> None:
    case, delta = with_convolution(unet(tmp_path))
    tensors = {name: tensor.to(dtype) for name, tensor in case.tensors.items()}
    of_diffusers(case.base)
    save_file(tensors, case.base / "diffusion_pytorch_model.safetensors")
    for name in case.deltas:
        tensors[name] = (tensors[name].double() + case.delta(name)).to(dtype)
    tensors["conv_in.weight"] = (tensors["conv_in.weight"].double() + times * delta).to(dtype)
    merged = of_diffusers(write(tmp_path / "merged", tensors))
    assert kinds(check_merged(merged, base=case.base, adapter=case.adapter)) == expected


def test_an_element_of_a_kernel_is_shown_by_all_its_indices(tmp_path: Path) -> None:
    case, delta = with_convolution(unet(tmp_path))
    tensors = case.right()
    tensors["conv_in.weight"] = (tensors["conv_in.weight"].double() + delta).float()
    tensors["conv_in.weight"][3, 2, 1, 0] += 0.5
    of_diffusers(case.base)
    merged = of_diffusers(write(tmp_path / "merged", tensors))
    found = check_merged(merged, base=case.base, adapter=case.adapter)
    assert "[3, 2, 1, 0] is" in message(found, MergeCause.OFF)


def test_an_adapter_that_takes_a_model_of_diffusers_is_refused(tmp_path: Path) -> None:
    """DoRA is no sum of the base and a product."""
    case, _ = with_convolution(unet(tmp_path), use_dora=True)
    merged = of_diffusers(write(tmp_path / "merged", case.tensors))
    of_diffusers(case.base)
    with pytest.raises(InputError, match="this base is one of diffusers"):
        check_merged(merged, base=case.base, adapter=case.adapter)
