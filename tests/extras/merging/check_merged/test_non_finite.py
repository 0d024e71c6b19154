"""NaN and infinity: the adapter's own are named as the adapter's, and what overflows in the merge is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged
from tests.extras.merging.check_merged.made_merges import (
    PREFIX,
    Case,
    change_adapter,
    checked,
    kinds,
    llama,
    message,
    write,
)

Q = "model.layers.1.self_attn.q_proj.weight"
LORA_A = f"{PREFIX}{Q.replace('.weight', '.lora_A.weight')}"
LORA_B = f"{PREFIX}{Q.replace('.weight', '.lora_B.weight')}"


def with_broken_adapter(folder: Path, key: str, value: float) -> tuple[Case, dict[str, torch.Tensor]]:
    """Return a case whose adapter holds one bad number, and the right merge of the adapter before that."""
    case = llama(folder)
    right = case.right()

    def breaks(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key][2, 1] = value

    change_adapter(case, breaks)
    return case, right


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("key", [LORA_A, LORA_B])
def test_an_adapter_that_is_not_finite_is_named_with_its_tensor(tmp_path: Path, key: str, value: float) -> None:
    case, right = with_broken_adapter(tmp_path, key, value)
    scaling, b, a = case.deltas[Q]
    (a if key == LORA_A else b)[2, 1] = value
    found = checked(case, tmp_path, {**right, Q: case.tensors[Q] + scaling * (b @ a)})
    assert (found.verdict, kinds(found)) == ("inconsistent", [MergeCause.ADAPTER_NOT_FINITE])
    said = message(found, MergeCause.ADAPTER_NOT_FINITE)
    assert f"{key}: 1 of 128 elements, the first at [2, 1]" in said
    assert "1 of 14 adapted tensors" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_folder_against_an_adapter_that_is_not_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    """The folder was merged from the adapter before it broke: nothing about the folder explains that."""
    case, right = with_broken_adapter(tmp_path, LORA_B, math.nan)
    found = checked(case, tmp_path, {name: tensor.to(dtype) for name, tensor in right.items()})
    assert kinds(found) == [MergeCause.ADAPTER_NOT_FINITE]


def test_a_saved_module_that_is_not_finite(tmp_path: Path) -> None:
    case = llama(tmp_path)
    head = torch.ones(64, 32)
    head[5, 6] = math.nan
    change_adapter(case, lambda t: t.update({f"{PREFIX}lm_head.weight": head}), modules_to_save=["lm_head"])
    found = checked(case, tmp_path, {**case.right(), "lm_head.weight": head})
    assert kinds(found) == [MergeCause.ADAPTER_NOT_FINITE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_that_overflows_float16_is_wrong(tmp_path: Path, dtype: torch.dtype) -> None:
    case = llama(tmp_path)
    change_adapter(case, lambda t: t[LORA_B].mul_(1e7))
    case.deltas[Q][1].mul_(1e7)
    merged = {**case.right(dtype), Q: case.with_delta(Q, dtype=dtype)}
    found = checked(case, tmp_path, merged)
    if dtype == torch.float32:
        assert kinds(found) == []
        return
    overflowed = int(merged[Q].isinf().sum())
    assert 0 < overflowed < merged[Q].numel()
    assert (found.verdict, kinds(found)) == ("inconsistent", [MergeCause.OVERFLOW])
    said = message(found, MergeCause.OVERFLOW)
    assert f"{overflowed} of 1024 elements" in said
    first = tuple(merged[Q].isinf().nonzero()[0].tolist())
    exact = float(case.tensors[Q].double()[first] + case.delta(Q)[first])
    assert f"[{first[0]}, {first[1]}] is {float(merged[Q][first]):g}, base + adapter is {exact:.6g}" in said
    assert said.endswith("and the largest number of float16 is 65504")


def test_a_nan_of_the_merge_alone_is_wrong(tmp_path: Path) -> None:
    case = llama(tmp_path)
    merged = case.right()
    merged[Q][7, 8] = math.nan
    found = checked(case, tmp_path, merged)
    assert kinds(found) == [MergeCause.OVERFLOW]
    assert "1 of 1024 elements; [7, 8] is nan" in message(found, MergeCause.OVERFLOW)


def test_an_untouched_tensor_that_overflows(tmp_path: Path) -> None:
    case = llama(tmp_path)
    case.tensors["model.norm.weight"][3] = 1e6
    write_base(case)
    found = checked(case, tmp_path, case.right(torch.float16))
    assert kinds(found) == [MergeCause.OVERFLOW]
    assert "model.norm.weight" in message(found, MergeCause.OVERFLOW)


def write_base(case: Case) -> None:
    save_file(case.tensors, case.base / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_of_the_base_that_is_not_finite_stays(tmp_path: Path, value: float) -> None:
    """A base may hold NaN, in rows that nobody reads for example: its merge holds the same."""
    case = llama(tmp_path)
    case.tensors[Q][4, 5] = value
    case.tensors["model.embed_tokens.weight"][6] = value
    write_base(case)
    assert kinds(checked(case, tmp_path, case.right())) == []


def test_other_mistakes_are_found_beside_an_overflow(tmp_path: Path) -> None:
    case = llama(tmp_path)
    change_adapter(case, lambda t: t[LORA_B].mul_(1e7))
    case.deltas[Q][1].mul_(1e7)
    other = "model.layers.0.mlp.up_proj.weight"
    merged = {**case.right(torch.float16), other: case.tensors[other].half()}
    merged[Q][~merged[Q].isinf()] += 64.0
    found = checked(case, tmp_path, merged)
    assert set(kinds(found)) == {MergeCause.OVERFLOW, MergeCause.NOT_MERGED, MergeCause.OFF}


def test_without_an_adapter_it_is_said_beside_the_rank(tmp_path: Path) -> None:
    case = llama(tmp_path)
    merged = case.right()
    merged[Q][7, 8] = math.nan
    found = check_merged(write(tmp_path / "merged", merged), base=case.base)
    assert kinds(found) == [MergeCause.OVERFLOW]
    assert f"{Q}: 1 of 1024 elements; [7, 8] is nan" in message(found, MergeCause.OVERFLOW)
    assert any("13 tensors by rank 4" in finding.message for finding in found.findings)
