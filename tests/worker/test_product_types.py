"""In which dtype modules multiply: a router that casts, one that does not, and what a class keeps in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from consistency.worker.product_types import kept_wide, product_types
from tests.worker.model.made_models import a_llama

IDS = torch.arange(1, 9)[None]
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


class Gate(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), self.weight.float()).to(x.dtype)


@pytest.fixture
def routed() -> Any:
    """Return a model in bfloat16 one of whose products is computed in float32."""
    model = a_llama(num_hidden_layers=2)
    model.model.layers[1].mlp.gate_proj.__class__ = Gate
    return model.to(torch.bfloat16).eval()


def test_each_module_has_the_dtype_in_which_it_multiplies(routed: Any) -> None:
    found = product_types(routed, INPUTS)
    assert found["model.layers.1.mlp.gate_proj"] == "float32"
    assert found["model.layers.0.mlp.gate_proj"] == found["lm_head"] == "bfloat16"


def test_a_model_in_float32_has_nothing_to_trace() -> None:
    assert product_types(a_llama().eval(), INPUTS) == {}
    assert product_types(a_llama().to(torch.bfloat16).eval(), {"pixel_values": torch.ones(1, 3, 4, 4)}) == {}


def test_what_a_class_keeps_in_float32_depends_on_the_dtype(routed: Any) -> None:
    modules = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj.base_layer", "model.layers.0.mlp.down_proj"]
    assert kept_wide(routed, modules) == set()
    routed._keep_in_fp32_modules = {"up_proj"}
    assert kept_wide(routed, modules) == set(), "float16 alone"
    assert kept_wide(routed.to(torch.float16), modules) == set(modules[:2])
    routed.to(torch.bfloat16)._keep_in_fp32_modules_strict = {"down_proj"}
    assert kept_wide(routed, modules) == {modules[2]}
