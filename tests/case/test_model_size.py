"""Bytes of a model from its headers, compared with the bytes of the tensors that transformers and PEFT make."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import transformers

from consistency.case.builtin import builtin_folder
from consistency.case.model_size import FIXED_BYTES, item_bytes, model_size
from consistency.case.options import Options
from consistency.case.preflight import prepare_case


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sizes_are_those_of_the_loaded_tensors(name: str, dtype: Any) -> None:
    found = model_size(prepare_case(Options(base=f"builtin:{name}", dtype=dtype)))
    assert found is not None
    folder = builtin_folder(name)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    sizes = [parameter.nbytes for parameter in base.parameters()]
    assert found.base == sum(sizes)
    assert found.largest == max(sizes)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter")
    assert found.adapter == sum(p.nbytes for n, p in model.named_parameters() if "lora_" in n)
    assert found.whole == found.base + found.adapter + found.working
    assert found.working > FIXED_BYTES


def test_the_largest_adapted_layer_and_the_inputs_decide_what_the_stages_need() -> None:
    alone = model_size(prepare_case(Options(base="builtin:llama", adapter=None)))
    bare = prepare_case(Options(base=str(builtin_folder("llama") / "base")))
    without = model_size(bare)
    assert alone is not None
    assert without is not None
    assert without.adapter == 0
    assert alone.working - without.working == 128 * 256 * (2 * 4 + 2 * 4), "its weight, its copy and two deltas"


def test_no_header_no_size() -> None:
    assert model_size(prepare_case(Options(base="python:tests.worker.model.factories:plain"))) is None


@pytest.mark.parametrize(
    ("dtype", "size"), [("BF16", 2), ("F32", 4), ("F8_E4M3", 1), ("I64", 8), ("BOOL", 1), ("U8", 1), ("C64", 8)]
)
def test_sizes_of_elements(dtype: str, size: int) -> None:
    assert item_bytes(dtype) == size
