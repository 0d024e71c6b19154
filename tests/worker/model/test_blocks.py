"""Which modules are the blocks of a model, and how much a backward pass keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, DynamicCache

from consistency.worker.model.blocks import (
    LEAST_ROOM_BYTES,
    ROOM_BYTES,
    RecomputationError,
    Room,
    blocks_of,
    recomputed,
    room_for,
)


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
    assert len(blocks_of(model)) == count


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


def kept_elements(depth: int, *, recompute: bool, room: int = 0) -> int:
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
            with recomputed(model, room=room):
                model(x)
        else:
            model(x)
    return found


def test_what_is_kept_grows_by_the_states_between_blocks() -> None:
    grown = kept_elements(8, recompute=False) - kept_elements(4, recompute=False)
    assert grown >= 4 * 32 * (64 + 64 + 8)
    for depth in (4, 8):
        assert kept_elements(depth, recompute=True) == depth * 32 * 8


def test_blocks_keep_their_activations_until_the_room_is_full() -> None:
    a_block = 4 * 32 * (8 + 64 + 64)  # bytes: of two layers the input, of two tanh the result, which is an input too
    model, x = Deep(4), torch.randn(32, 8, requires_grad=True)
    runs = {name: 0 for name, _ in model.layers.named_children()}
    for name, layer in model.layers.named_children():
        next(layer.children()).register_forward_hook(lambda *_, name=name: runs.update({name: runs[name] + 1}))
    whole = torch.autograd.grad(model(x).sum(), x)[0]
    runs.update(dict.fromkeys(runs, 0))
    with recomputed(model, room=a_block + 1):
        found = torch.autograd.grad(model(x).sum(), x)[0]
    assert torch.equal(found, whole)
    assert list(runs.values()) == [1, 1, 2, 2]


@pytest.mark.parametrize("blocks_that_fit", [4, 10])
def test_what_is_kept_is_counted_again_unless_the_pass_before_left_half_of_the_room(blocks_that_fit: int) -> None:
    a_block = 4 * 32 * (8 + 64 + 64)
    model, x = Deep(4), torch.randn(32, 8, requires_grad=True)
    counted: list[int] = []
    with recomputed(model, room=blocks_that_fit * a_block) as room:
        take = room.take
        for _ in range(3):
            room.begin()
            seen: list[torch.Tensor] = []
            room.take = lambda tensor, seen=seen: seen.append(tensor) or take(tensor)  # type: ignore[misc, method-assign]
            torch.autograd.grad(model(x).sum(), x)
            counted.append(len(seen))
    assert counted[0] > 0
    assert counted[1:] == counted[:1] * 2 if blocks_that_fit == 4 else counted[1:] == [0, 0]
    assert room.is_ample == (blocks_that_fit == 10)


def test_weights_take_no_room_and_views_of_one_tensor_take_it_once() -> None:
    model, kept = Deep(1), torch.zeros(4, 4)
    room = Room(kept.nbytes + 1, model)
    room.take(next(model.parameters()).t())
    for view in (kept, kept.t(), kept[:1]):
        room.take(view)
    assert not room.is_full
    room.take(kept.clone())
    assert room.is_full


def test_the_room_is_a_quarter_of_the_largest_block_in_float64_between_two_limits() -> None:
    assert room_for(Deep(2)) == room_for(nn.Linear(2, 2)) == LEAST_ROOM_BYTES
    with torch.device("meta"):
        layers = nn.Sequential(nn.ModuleList([nn.Linear(4_000, 4_000), nn.Linear(5_000, 5_000)]))
        assert room_for(layers) == 8 * (5_000 * 5_000 + 5_000) // 4
        assert room_for(nn.Sequential(nn.ModuleList(nn.Linear(40_000, 40_000) for _ in range(2)))) == ROOM_BYTES


def test_a_model_without_gradients_runs_as_it_does() -> None:
    model, x = Deep(2), torch.ones(3, 8)
    with torch.no_grad(), recomputed(model):
        found = model(x)
    assert torch.equal(found, model(x))
    assert all("forward" not in vars(layer) for layer in model.layers)


class Attending(Deep):
    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cache)
        return x


class Counting(nn.Module):
    """A layer that counts its passes, and ends in an error from one on."""

    def __init__(self, last: int = 9) -> None:
        super().__init__()
        self.inner, self.passes, self.last = nn.Linear(8, 8), 0, last

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:  # noqa: ARG002 - as a decoder layer's
        self.passes += 1
        if self.passes > self.last:
            raise ValueError("the hook is gone")
        found: torch.Tensor = self.inner(x)
        return found


def attending(last: int = 9) -> Attending:
    model = Attending(0)
    model.layers = nn.ModuleList(Counting(last) for _ in range(2))
    return model


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_block_with_a_cache_is_computed_once(has_cache: bool) -> None:
    """A second pass would add the same states once more."""
    model = attending()
    with recomputed(model):
        model(torch.ones(3, 8), DynamicCache() if has_cache else None).sum().backward()
    assert [layer.passes for layer in model.layers] == [1 if has_cache else 2] * 2


def test_a_block_that_fails_the_second_time_cannot_be_recomputed() -> None:
    """Poly gives its layers the tasks by hooks that are gone when the pass has ended."""
    model = attending(last=1)
    with recomputed(model):
        found = model(torch.ones(3, 8)).sum()
        with pytest.raises(RecomputationError, match="Counting does not run again: ValueError: the hook is gone"):
            found.backward()
    with recomputed(model), pytest.raises(ValueError, match="the hook is gone"):
        model(torch.ones(3, 8))


def test_code_that_runs_again_is_inside_the_context_that_is_asked_for() -> None:
    entered: list[str] = []

    @contextmanager
    def again() -> Iterator[None]:
        entered.append("in")
        yield

    model = Deep(2)
    with recomputed(model, again=again):
        found = model(torch.ones(3, 8)).sum()
        assert not entered
        found.backward()
    assert entered == ["in", "in"]


def test_a_sparse_table_of_a_method_takes_no_room() -> None:
    """FRoD has them, and a sparse tensor has no storage to count."""
    model = Deep(2)
    model.register_buffer("table", torch.eye(8).to_sparse())
    room = Room(1 << 20, model)
    assert room.take(torch.eye(8).to_sparse()).layout is torch.sparse_coo
    assert not room.is_full
    with recomputed(model, room=1 << 20):
        torch.sparse.mm(model.table, model(torch.ones(8, 8))).sum().backward()
