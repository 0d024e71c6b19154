from __future__ import annotations

import pytest

from consistency.capture.names import adapter_place, is_method_tensor, module_place, peft_prefixes, split_name


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.norm.weight", ("model.norm", "weight")),
        ("model.layers.0.self_attn.q_proj.bias", ("model.layers.0.self_attn.q_proj", "bias")),
        ("embedding.weight", ("embedding", "weight")),
        ("scale", ("scale", "tensor")),
    ],
)
def test_a_parameter_is_a_layer_and_a_tensor(name: str, place: tuple[str, str]) -> None:
    assert split_name(name) == place


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("ending", "tensor"),
    [
        ("lora_A.weight", "lora_A"),
        ("lora_B.weight", "lora_B"),
        ("lora_embedding_A", "lora_embedding_A"),
        ("lora_magnitude_vector", "lora_magnitude_vector"),
        ("lora_magnitude_vector.weight", "lora_magnitude_vector"),
        ("hada_w1_a", "hada_w1_a"),
        ("lokr_w2", "lokr_w2"),
        ("ia3_l", "ia3_l"),
        ("vera_lambda_b", "vera_lambda_b"),
        ("oft_R.weight", "oft_R"),
        ("boft_s", "boft_s"),
    ],
)
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_a_key_of_an_adapter_is_a_layer_and_what_the_method_calls_it(prefix: str, ending: str, tensor: str) -> None:
    assert adapter_place(f"{prefix}{Q}.{ending}") == (Q, tensor)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("base_model.model.score.weight", ("score", "weight")),  # modules_to_save
        ("base_model.model.model.norm.bias", ("model.norm", "bias")),
        (f"base_model.model.{Q}.lora_A.adapter.weight", (f"{Q}.lora_A.adapter", "weight")),
        ("prompt_embeddings", ("prompt_embeddings", "tensor")),
        ("lora_A.weight", ("lora_A", "weight")),  # a method's name alone is no layer
    ],
)
def test_other_keys_are_split_like_parameters(key: str, place: tuple[str, str]) -> None:
    assert adapter_place(key) == place


def test_every_method_of_the_installed_peft_is_known() -> None:
    """A method that PEFT registers otherwise than by a plain call is not found in its source, and fails here."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefixes = set(PEFT_TYPE_TO_PREFIX_MAPPING.values())
    assert len(prefixes) > 20
    assert prefixes <= set(peft_prefixes())
    for prefix in prefixes:
        assert adapter_place(f"base_model.model.{Q}.{prefix}x.weight") == (Q, f"{prefix}x")
        assert is_method_tensor(f"{Q}.{prefix}x")


def test_a_module_of_the_adapted_model_has_the_base_s_name() -> None:
    assert module_place(f"base_model.model.{Q}") == Q
    assert module_place(Q) == Q
    assert module_place("model.base_model.model.x") == "model.base_model.model.x"
