"""Sampled rows are those of a whole pass, whatever the model's code does; blocks of each kind stand for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from consistency.numerics.exact import Float64Mode
from consistency.worker.model.block_pass import BlockPass, ResultPlace
from consistency.worker.model.sampled_rows import (
    SampledPass,
    chosen_blocks,
    few_blocks,
    pick,
    rows_to_judge,
    run_all_rows,
    windows_of,
)
from consistency.worker.recorder import Skip
from tests.worker.model.made_models import SIZES, a_llama, perturb

TOKENS = 45


def mistral(**changes: Any) -> Any:
    sizes = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "sliding_window": 8, **changes}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))


def gemma() -> Any:
    sizes = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    kinds = ["sliding_attention", "full_attention"] * 2
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, layer_types=kinds))


def mixtral() -> Any:
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4))


def mamba() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**SIZES, "num_hidden_layers": 2}))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: a_llama(num_hidden_layers=3),
    "eager": lambda: a_llama(attn_implementation="eager"),
    "mistral": mistral,
    "gemma": gemma,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "mamba": mamba,
    "bert": bert,
}


def both(model: Any, *, tail: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], SampledPass]:
    """Return the sampled rows of a whole pass in float64, those of a sampled one, and that pass."""
    ids = torch.randint(1, 64, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    rows, blocks = rows_to_judge(TOKENS, windows_of(model)), chosen_blocks(model)
    given: dict[str, torch.Tensor] = {}
    last = ""

    def keep(name: str, value: torch.Tensor) -> torch.Tensor:
        given[name] = value.detach().clone()
        return value

    def see(place: ResultPlace, _: torch.Tensor) -> None:
        nonlocal last
        if place.layer in blocks and not place.part.startswith("input."):
            last = str(place)

    def give(name: str, value: torch.Tensor) -> torch.Tensor:
        return given[name].to(value.dtype)

    def into(found: dict[str, torch.Tensor]) -> Callable[[ResultPlace, torch.Tensor], None]:
        def take(place: ResultPlace, result: torch.Tensor) -> None:
            picked = pick(result.detach(), TOKENS, rows)
            if picked is not None:
                found[str(place)] = picked

        return take

    whole: dict[str, torch.Tensor] = {}
    some: dict[str, torch.Tensor] = {}
    run_all_rows(model, inputs, BlockPass(keep, see), blocks)
    sampled = SampledPass(tokens=TOKENS, rows=rows, last=last if tail else "")
    with torch.no_grad(), Float64Mode():
        for name, output in run_all_rows(model, inputs, BlockPass(give, into(whole)), blocks).items():
            into(whole)(ResultPlace(name), output)
        for name, output in sampled.run(model, inputs, give, into(some), blocks).items():
            into(some)(ResultPlace(name), output)
    return whole, some, sampled


@pytest.mark.parametrize("name", MODELS)
def test_sampled_rows_are_those_of_a_whole_pass(name: str) -> None:
    model = MODELS[name]().eval()
    perturb(model)
    whole, some, sampled = both(model, tail=name not in ("gpt2", "bert"))
    masks = {name for name in some if "mask" in name}
    assert some.keys() - masks == whole.keys() - masks
    assert any(place.endswith(".mlp::") or "mixer" in place or "output" in place for place in some)
    for place in some.keys() & whole.keys():
        assert some[place].shape == whole[place].shape, place
        torch.testing.assert_close(some[place], whole[place], rtol=1e-10, atol=1e-12, msg=place)
    in_full = any(sampled._computes_in_full.values())
    assert in_full == (name == "mamba"), "a state space has no keys, so its rows are computed together"


def test_a_block_that_looks_at_its_neighbours_is_computed_in_full() -> None:
    model = a_llama(num_hidden_layers=2).eval()
    perturb(model)
    mlp = model.model.layers[1].mlp
    real = mlp.forward
    mlp.forward = lambda x: real(x + x.roll(1, 1))
    whole, some, sampled = both(model, tail=True)
    assert sampled._computes_in_full == {"model.layers.0": False, "model.layers.1": True}
    torch.testing.assert_close(some["model.layers.1::"], whole["model.layers.1::"], rtol=1e-10, atol=1e-12)


def test_the_first_the_middle_and_the_last_block_of_each_kind_stand_for_all() -> None:
    assert chosen_blocks(a_llama(num_hidden_layers=7)) == [f"model.layers.{number}" for number in (0, 3, 6)]
    sizes = {**SIZES, "num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    gemma3 = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))  # every sixth sees all
    assert chosen_blocks(gemma3) == [f"model.layers.{number}" for number in (0, 5, 10, 11)] or chosen_blocks(
        gemma3
    ) == [f"model.layers.{number}" for number in (0, 5, 6, 10, 11)]


def test_the_other_blocks_hand_on_what_they_get() -> None:
    model = a_llama(num_hidden_layers=3).eval()
    ids = torch.arange(1, 9)[None]
    seen: list[torch.Tensor] = []
    model.model.layers[2].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output))
    with few_blocks(model, ["model.layers.0", "model.layers.2"]):
        model(ids)
    assert torch.equal(*seen)
    own = model.model.layers[1].forward
    assert own.__func__ is type(model.model.layers[1]).forward, "it is put back"


def test_blocks_that_hand_on_several_tensors_are_not_left_out() -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4))
    with pytest.raises(Skip, match="several tensors"), few_blocks(model, chosen_blocks(model)):
        model(torch.arange(1, 9)[None])


def test_rows_lie_at_the_ends_at_powers_of_two_and_at_the_borders_of_windows() -> None:
    rows = rows_to_judge(515, {100}).tolist()
    assert rows == sorted(set(rows))
    assert {0, 1, 2, 512, 513, 514, 127, 128, 129, 99, 100, 101, 199, 200, 201} <= set(rows)
    assert len(rows) >= 32, "enough for the limits of one pass"
    assert max(rows_to_judge(4099).tolist()) == 4098
    assert len(rows_to_judge(4099)) <= 64
    assert windows_of(mistral()) == {8}
