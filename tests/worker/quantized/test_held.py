"""What stores the quantized weights of the libraries that are installed, and that their formulas are those."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consistency.worker.quantized.held import (
    dequantized,
    inner_tensors,
    is_composite,
    is_quantized,
    quantized_layers,
    settings_in,
    stated_settings,
    stored_names,
    weight_of_layer,
)
from tests.worker.model.made_quantized import BITSANDBYTES, LAYER, TORCHAO, loaded, quantized

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_the_formula_is_what_the_library_computes(kind: str, dtype: str, tmp_path: Path) -> None:
    layer = loaded(quantized(kind, tmp_path, dtype=dtype)[0]).get_submodule(LAYER)
    weight, found = weight_of_layer(layer), dequantized(layer)
    assert weight is not None
    assert found.dtype == weight.dtype
    assert torch.equal(found, weight.rounded())
    assert bool(((found.double() - weight.exact()).abs() <= weight.dequantized_allowance(weight.exact())).all())


@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_every_stored_tensor_has_a_name_in_the_file(kind: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    base = quantized(kind, tmp_path)[0]
    layer = loaded(base).get_submodule(LAYER)
    with safe_open(base / "model.safetensors", framework="pt") as file:
        stored = {name for name in file.keys() if name.startswith(f"{LAYER}.")}  # noqa: SIM118 - no mapping
        for name, key, tensor in stored_names(f"{LAYER}.weight", layer.weight):
            assert name.startswith(f"{LAYER}.")
            assert torch.equal(file.get_tensor(key), tensor.data.reshape(file.get_tensor(key).shape))
            stored.remove(key)
        left = {name.removeprefix(f"{LAYER}.").partition(".bitsandbytes")[0] for name in stored}
        assert left <= {"weight_format", "weight.quant_state"}
        for name in stored & {f"{LAYER}.weight.quant_state.bitsandbytes__nf4"}:
            assert settings_in(file.get_tensor(name)) == stated_settings(layer.weight)


def test_layers_are_told_apart(tmp_path: Path) -> None:
    model = loaded(quantized("torchao-int8", tmp_path)[0])
    names = [name for name, _ in quantized_layers(model)]
    assert len(names) == 7
    assert "lm_head" not in names
    weight = model.get_submodule(LAYER).weight
    assert is_composite(weight)
    assert {name for name, _ in inner_tensors(weight)} == {"qdata", "scale", "zero_point"}
    plain = torch.nn.Linear(2, 2)
    assert not is_quantized(plain.weight)
    assert not is_quantized(None)


def test_a_kind_without_formula_has_none(tmp_path: Path) -> None:
    layer = loaded(quantized("torchao-int8", tmp_path)[0]).get_submodule(LAYER)
    assert weight_of_layer(layer) is not None
    layer.weight.act_pre_scale = torch.ones(1)  # of SmoothQuant: the layer scales its inputs too
    assert weight_of_layer(layer) is None
