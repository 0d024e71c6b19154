"""What an adapter should hold, by its config and the base's names: as PEFT decides it on the model."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.capture.names import adapter_place
from consistency.capture.names_in_files import expected_places

LLAMA = [
    f"model.layers.{i}.{name}.weight"
    for i in range(3)
    for name in ("input_layernorm", "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
]


def key(layer: str, tensor: str) -> str:
    return f"base_model.model.{layer}.{tensor}.weight"


def keys(*layers: str, tensors: tuple[str, ...] = ("lora_A", "lora_B")) -> list[str]:
    return [key(layer, tensor) for layer in layers for tensor in tensors]


Q = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]


def test_a_whole_adapter_holds_all_that_is_expected() -> None:
    found = expected_places({"target_modules": ["q_proj"]}, keys(*Q), LLAMA)
    assert found == [adapter_place(one) for one in keys(*Q)]


@pytest.mark.parametrize(
    "held",
    [keys(*Q)[:-1], keys(*Q)[1:], keys(*Q[:2]), keys(Q[1]), [key(layer, "lora_A") for layer in Q]],
    ids=["no-last-B", "no-first-A", "no-last-layer", "one-layer", "no-B"],
)
def test_what_the_file_lacks_is_expected(held: list[str]) -> None:
    found = expected_places({"target_modules": ["q_proj"]}, held, LLAMA)
    assert set(found) == {adapter_place(one) for one in keys(*Q)}


def test_layers_of_one_kind_hold_the_same_tensors() -> None:
    dora = keys(*Q, tensors=("lora_A", "lora_B", "lora_magnitude_vector"))
    found = expected_places({"target_modules": ["q_proj"]}, [*dora[:-1], key(Q[0], "lora_C")], LLAMA)
    assert (Q[2], "lora_magnitude_vector") in found
    assert (Q[1], "lora_C") not in found


def test_a_kind_without_any_layer_in_the_file_holds_what_others_do() -> None:
    found = expected_places({"target_modules": ["q_proj", "up_proj"]}, keys(*Q), LLAMA)
    assert ("model.layers.2.mlp.up_proj", "lora_B") in found


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"target_modules": r"model\.layers\.[01]\..*q_proj"},
        {"target_modules": None, "target_parameters": ["experts.gate_up_proj"]},
        {"target_modules": ["q_proj"], "layer_replication": [[0, 3], [1, 3]]},
    ],
)
def test_nothing_is_expected_where_names_alone_do_not_say_it(config: dict[str, Any]) -> None:
    assert expected_places(config, keys(Q[0]), LLAMA) == []


def test_layers_have_the_names_of_the_model() -> None:
    """The files of GPT-2 have `h.0` for `transformer.h.0`."""
    base = [f"h.{i}.attn.c_attn.weight" for i in range(3)]
    found = expected_places({"target_modules": ["c_attn"]}, keys("transformer.h.0.attn.c_attn"), base)
    assert [layer for layer, _ in found[::2]] == [f"transformer.h.{i}.attn.c_attn" for i in range(3)]


def test_nothing_is_expected_of_a_file_without_tensors_of_the_method() -> None:
    assert expected_places({"target_modules": ["q_proj"]}, ["prompt_embeddings"], LLAMA) == []
