"""Sizes from headers, compared with those of the tensors in the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from consistency.case.budget.shape import Shape, read_shape
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from tests.made_weights import Given, put


def zeros(*shape: int, dtype: str = "F32") -> Given:
    count = 1
    for size in shape:
        count *= size
    return (dtype, shape, bytes(count * {"F32": 4, "BF16": 2, "U8": 1, "I8": 1}[dtype]))


def made(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Given],
    adapter: dict[str, Given] | None = None,
    **more: Any,
) -> Shape:
    put(folder / "base/model.safetensors", tensors)
    (folder / "base/config.json").write_text(json.dumps({"model_type": "x", **config}))
    if adapter is not None:
        put(folder / "adapter/adapter_model.safetensors", adapter)
        settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q"], **more}
        (folder / "adapter/adapter_config.json").write_text(json.dumps(settings))
    given = None if adapter is None else str(folder / "adapter")
    return read_shape(Case(name="x", base=str(folder / "base"), adapter=given))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_builtin_case_has_the_sizes_of_its_files(name: str) -> None:
    found = read_shape(prepare_case(Options(base=f"builtin:{name}")))
    folder = builtin_folder(name)
    with safe_open(folder / "base/model.safetensors", framework="numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    with safe_open(folder / "adapter/adapter_model.safetensors", framework="numpy") as file:
        factors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert found.elements == sum(tensor.size for tensor in tensors.values())
    assert (found.mapped_bytes, found.converted_bytes) == (sum(t.nbytes for t in tensors.values()), 0)
    assert found.largest_elements == max(tensor.size for tensor in tensors.values())
    assert (found.blocks, found.hidden, found.vocabulary, found.unknown) == (4, 128, 512, ())
    assert found.adapter_bytes == sum(f.nbytes for f in factors.values())
    assert len(found.layers) == sum("lora_A" in key for key in factors)
    assert {layer.rank for layer in found.layers} == {min(f.shape) for key, f in factors.items() if "lora_A" in key}
    assert found.matrix_elements < found.elements


def test_a_dtype_that_the_file_does_not_have_is_converted_and_no_worker_shares_it() -> None:
    found = read_shape(prepare_case(Options(base="builtin:llama", dtype="bfloat16")))
    assert (found.dtype, found.mapped_bytes, found.converted_bytes) == ("bfloat16", 0, 2 * found.elements)


def test_a_head_that_no_file_holds_multiplies_by_the_embeddings(tmp_path: Path) -> None:
    tensors = {"embed.weight": zeros(10, 4), "layers.0.q.weight": zeros(4, 4), "layers.1.q.weight": zeros(4, 4)}
    assert made(tmp_path, {"architectures": ["XForCausalLM"]}, tensors).matrix_elements == 2 * 16 + 40
    assert made(tmp_path, {"architectures": ["XModel"]}, tensors).matrix_elements == 2 * 16


def test_what_the_adapter_saves_but_does_not_train_has_no_gradient(tmp_path: Path) -> None:
    base = {"embed.weight": zeros(10, 4), "layers.0.q.weight": zeros(4, 4), "lm_head.weight": zeros(10, 4)}
    place = "base_model.model"
    adapter = {
        f"{place}.layers.0.q.lora_A.weight": zeros(2, 4),
        f"{place}.layers.0.q.lora_B.weight": zeros(4, 2),
        f"{place}.embed.weight": zeros(10, 4),
        f"{place}.lm_head.weight": zeros(10, 4),
    }
    found = made(tmp_path, {"hidden_size": 4}, base, adapter, modules_to_save=["lm_head"])
    assert found.trained_elements == 16 + 40
    assert found.largest_trained_elements == 40
    assert [(layer.name, layer.elements, layer.rank) for layer in found.layers] == [("layers.0.q", 16, 2)]


def test_names_that_differ_by_leading_components_meet(tmp_path: Path) -> None:
    adapter = {"base_model.model.model.layers.0.q.lora_A.weight": zeros(2, 4)}
    found = made(tmp_path, {}, {"layers.0.q.weight": zeros(4, 6)}, adapter)
    assert [layer.elements for layer in found.layers] == [24]


def test_another_method_adapts_the_layers_that_its_tensors_name(tmp_path: Path) -> None:
    adapter = {"base_model.model.layers.0.q.ia3_l": zeros(4, 1)}
    found = made(tmp_path, {}, {"layers.0.q.weight": zeros(4, 6)}, adapter, peft_type="IA3")
    assert [(layer.elements, layer.rank) for layer in found.layers] == [(24, None)]


def test_what_decides_is_read_from_the_config(tmp_path: Path) -> None:
    tensors = {"layers.0.q.weight": zeros(4, 4)}

    def units(**config: Any) -> int:
        return made(tmp_path, config, tensors).kinked_units

    assert made(tmp_path, {"num_local_experts": 8}, tensors).experts == 8
    assert units(feed_forward_proj="relu", d_ff=48) == 48
    assert units(hidden_act="relu2", intermediate_size=96) == 96
    assert units(activation_function="relu", n_embd=16, n_inner=None) == 64
    for smooth in ("gelu_new", "silu", "gated-gelu", "quick_gelu"):
        assert units(hidden_act=smooth, intermediate_size=96) == 0


def test_what_is_not_stated_is_named_and_not_guessed(tmp_path: Path) -> None:
    tensors = {"layers.0.q.weight": zeros(4, 4, dtype="U8")}
    found = made(tmp_path, {"quantization_config": {"bits": 4}, "hidden_size": True}, tensors)
    assert found.hidden is None
    assert len(found.unknown) == 2
    assert any("quantized" in text for text in found.unknown)
    assert any("hidden size" in text for text in found.unknown)
    made_by_function = read_shape(Case(name="x", base="python:a:b"))
    assert made_by_function.loaded_bytes == 0
    assert "function" in made_by_function.unknown[0]


def test_a_quantized_base_has_the_elements_of_its_weights_and_the_bytes_of_its_file(tmp_path: Path) -> None:
    tensors = {
        "layers.0.q.weight": zeros(4, 6, dtype="I8"),
        "layers.0.q.SCB": zeros(4),
        "norm.weight": zeros(6),
    }
    adapter = {"base_model.model.layers.0.q.lora_A.weight": zeros(2, 6)}
    found = made(tmp_path, {"quantization_config": {}, "dtype": "float32"}, tensors, adapter)
    assert found.elements == 30
    assert (found.mapped_bytes, found.converted_bytes) == (24 + 16 + 24, 0)
    assert [(layer.elements, layer.rank) for layer in found.layers] == [(24, 2)]


def test_a_case_without_a_model_has_no_size() -> None:
    assert read_shape(Case(name="x", base="")) == Shape()


def test_fields_of_another_type_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    """Who makes the model refuses them; the estimate must not end the command before."""
    folder = builtin_folder("llama")
    for part in ("base", "adapter"):
        shutil.copytree(folder / part, tmp_path / part)
    case = Case(name="x", base=str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))
    expected = read_shape(case)
    for path, field in ((tmp_path / "adapter/adapter_config.json", "modules_to_save"),
                        (tmp_path / "base/config.json", "architectures")):  # fmt: skip
        table = json.loads(path.read_text())
        for value in (5, True, "text", {"a": 1}, [5, None]):
            path.write_text(json.dumps({**table, field: value}))
            assert read_shape(case).adapter_bytes == expected.adapter_bytes
            assert read_shape(case).elements == expected.elements
