"""Float64 passes through quantized layers, and that no pass leaves a model changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consistency.numerics.exact import in_float64
from consistency.worker.quantized.exact import as_loaded, exact_layers
from consistency.worker.quantized.held import dequantized, weight_of_layer
from tests.worker.model.made_quantized import BITSANDBYTES, LAYER, TORCHAO, loaded, quantized

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_a_quantized_layer_multiplies_by_its_exact_weight(kind: str, tmp_path: Path) -> None:
    layer = loaded(quantized(kind, tmp_path)[0]).get_submodule(LAYER)
    weight = weight_of_layer(layer)
    assert weight is not None
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(2))
    with exact_layers(layer):
        found = in_float64(layer, x)
    assert found.dtype == torch.float64
    assert torch.allclose(found, x.double() @ weight.exact().T, rtol=1e-12, atol=1e-14)
    assert "forward" not in vars(layer)
    with torch.no_grad():
        native = layer(x)
    assert native.dtype == torch.float32
    assert 0 < float((native.double() - found).abs().max()) < 0.05 * float(found.abs().max())


@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_a_pass_leaves_the_weights_as_they_were(kind: str, tmp_path: Path) -> None:
    """On a CPU with AVX512-BF16 a pass packs 4-bit weights anew; any pass moves the scales of 8-bit ones."""
    layer = loaded(quantized(kind, tmp_path)[0]).get_submodule(LAYER)
    before, state = dequantized(layer), _state(layer)
    x = torch.ones(1, before.shape[1])
    with torch.no_grad():
        with as_loaded(layer):
            first = layer(x)
        assert _state(layer) == state
        assert torch.equal(dequantized(layer), before)
        with as_loaded(layer):
            assert torch.equal(layer(x), first)


def _state(layer: Any) -> Any:
    record = getattr(layer.weight, "quant_state", None)
    noted = {name: id(value) for name, value in vars(record).items()} if record is not None else {}
    return noted, layer.weight.data_ptr(), layer.weight.shape, getattr(layer.weight, "SCB", None) is None
