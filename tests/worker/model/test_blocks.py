"""Which modules are the blocks of a model, and how much a backward pass keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from consistency.worker.model.blocks import recomputed, repeated_blocks


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2}, 3),
        ({"model_type": "t5", "num_layers": 2, "num_decoder_layers": 3, "d_model": 16, "num_heads": 2}, 5),
        ({"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2}, 2),
    ],
)
def test_blocks_are_the_outermost_lists_of_layers(config: dict[str, object], count: int) -> None:
    made = AutoConfig.for_model(**config, vocab_size=32)
    with torch.device("meta"):
        model = AutoModel.from_config(made)
    assert len(repeated_blocks(model)) == count


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def kept_elements(depth: int, *, recompute: bool) -> int:
    """Return how many elements of activations the forward pass keeps for the backward pass."""
    model, found = Deep(depth), 0
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    x = torch.randn(32, 8, requires_grad=True)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found += tensor.numel() if tensor.untyped_storage().data_ptr() not in weights else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if recompute:
            with recomputed(model):
                model(x)
        else:
            model(x)
    return found


def test_what_is_kept_grows_by_the_states_between_blocks() -> None:
    grown = kept_elements(8, recompute=False) - kept_elements(4, recompute=False)
    assert grown >= 4 * 32 * (64 + 64 + 8)
    for depth in (4, 8):
        assert kept_elements(depth, recompute=True) == depth * 32 * 8


def test_a_model_without_gradients_runs_as_it_does() -> None:
    model, x = Deep(2), torch.ones(3, 8)
    with torch.no_grad(), recomputed(model):
        found = model(x)
    assert torch.equal(found, model(x))
    assert all("forward" not in vars(layer) for layer in model.layers)
