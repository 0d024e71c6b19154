"""Whether transformers loads a merged folder: names, shapes and config.json against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import zoo
from consistency.comparison.result import Comparison
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged, statement
from tests.extras.merging.check_merged.made_merges import Case, checked, fused, kinds, llama, message, save, write


@pytest.fixture(autouse=True)
def quiet() -> None:
    zoo.quiet()


def with_config(case: Case, folder: Path, **settings: Any) -> Comparison:
    """Check a right merge whose config.json has other settings than the base's."""
    config = json.loads((case.base / "config.json").read_text())
    return checked(case, folder, case.right(), {**config, **settings})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model."])
def test_names_of_a_wrapper_do_not_load(tmp_path: Path, prefix: str) -> None:
    case = llama(tmp_path)
    found = checked(case, tmp_path, {f"{prefix}{name}": tensor for name, tensor in case.right().items()})
    assert (found.exit_status, kinds(found)) == (1, [MergeCause.DOES_NOT_LOAD])
    assert statement(found).heading == "MERGED, AND DOES NOT LOAD"
    (finding,) = (one for one in found.findings if one.kind == MergeCause.DOES_NOT_LOAD)
    assert f"0 of {len(case.tensors)} tensors of the folder load as LlamaForCausalLM" in finding.message
    assert f"such as {prefix}lm_head.weight, for {prefix} in its name" in finding.message
    assert f"or take {prefix} out of the keys" in str(finding.next)
    names = [one.message for one in found.findings if one.kind == "names"]
    assert names == [f"names matched: {len(case.tensors)} without {prefix} in them"]


def test_names_of_a_wrapper_inside_of_others(tmp_path: Path) -> None:
    case = llama(tmp_path)
    wrapped = {name.replace("mlp", "_fsdp_wrapped_module.mlp"): tensor for name, tensor in case.right().items()}
    found = checked(case, tmp_path, wrapped)
    assert kinds(found) == [MergeCause.DOES_NOT_LOAD]
    assert "6 keys have no place in it" in message(found, MergeCause.DOES_NOT_LOAD)


def test_the_inner_model_alone_loads(tmp_path: Path) -> None:
    """transformers adds and removes the prefix of the model without a head by itself."""
    case = llama(tmp_path)
    found = checked(case, tmp_path, {name.removeprefix("model."): one for name, one in case.right().items()})
    assert (found.verdict, kinds(found)) == ("consistent", [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_hidden_layers": 3}, "9 tensors of it are in no file and begin as random values"),
        ({"num_hidden_layers": 1}, "9 keys have no place in it, such as model.layers.1."),
        ({"num_key_value_heads": 4}, "4 have another shape: model.layers.0.self_attn.k_proj.weight is (16, 32)"),
        ({"vocab_size": 70}, "2 have another shape: lm_head.weight is (64, 32), config.json makes it (70, 32)"),
        ({"hidden_size": 33, "head_dim": None}, "transformers cannot load the folder by its config.json"),
    ],
)
def test_another_config_does_not_load(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    found = with_config(llama(tmp_path), tmp_path, **settings)
    assert (found.exit_status, MergeCause.DOES_NOT_LOAD in kinds(found)) == (1, True)
    assert said in message(found, MergeCause.DOES_NOT_LOAD)
    (finding,) = (one for one in found.findings if one.kind == MergeCause.DOES_NOT_LOAD)
    assert "copy config.json of the base" in str(finding.next)


def test_no_config(tmp_path: Path) -> None:
    case = llama(tmp_path)
    merged = write(tmp_path / "merged", case.right())
    (merged / "config.json").unlink()
    found = check_merged(merged, base=case.base, adapter=case.adapter)
    assert (found.exit_status, kinds(found)) == (1, [MergeCause.DOES_NOT_LOAD])
    one_file = check_merged(merged / "model.safetensors", base=case.base, adapter=case.adapter)
    assert (one_file.verdict, kinds(one_file)) == ("consistent", []), "a file alone is no folder"


@pytest.mark.parametrize("unties", [True, False])
def test_an_untied_folder_without_a_head(tmp_path: Path, unties: bool) -> None:
    plain = llama(tmp_path / "plain")
    settings = json.loads((plain.base / "config.json").read_text()) | {"tie_word_embeddings": True}
    tied = {name: tensor for name, tensor in plain.tensors.items() if name != "lm_head.weight"}
    case = save(tmp_path / "tied", tied, settings, list(plain.deltas))
    found = checked(case, tmp_path, case.right(), settings | {"tie_word_embeddings": not unties, "use_cache": True})
    if not unties:
        assert (found.verdict, kinds(found)) == ("consistent", [])
        return
    assert (found.exit_status, kinds(found)) == (1, [MergeCause.DOES_NOT_LOAD])
    (finding,) = (one for one in found.findings if one.kind == MergeCause.DOES_NOT_LOAD)
    assert "1 tensor of it is in no file and begins as random values (lm_head.weight)" in finding.message
    assert "set tie_word_embeddings" in str(finding.next)


def test_a_class_that_transformers_does_not_have_is_not_checked(tmp_path: Path) -> None:
    case = fused(tmp_path)
    tensors = {f"thinker.{name}": tensor for name, tensor in case.right().items()}
    found = checked(case, tmp_path, tensors)
    assert (found.verdict, kinds(found)) == ("consistent", [])
    (text,) = found.not_checked
    assert "whether transformers loads the folder" in text


@pytest.mark.parametrize("model", list(zoo.MODELS))
def test_every_kind_of_model_loads_as_it_was_saved(tmp_path: Path, model: str) -> None:
    """A wrapper's prefix is seen in each, and without it nothing is said."""
    base, folder = tmp_path / "base", tmp_path / "folder"
    zoo.save_model(model, base)
    config = json.loads((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    # one more setting, so that transformers is asked
    write(folder, tensors, {**config, "model_name": "x"})
    found = check_merged(folder, base=base)
    assert (found.verdict, kinds(found), found.not_checked) == ("consistent", [], ())
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, folder / "model.safetensors", {"format": "pt"})
    assert kinds(check_merged(folder, base=base)) == [MergeCause.DOES_NOT_LOAD]


def test_half_types_load(tmp_path: Path) -> None:
    case = llama(tmp_path)
    config = json.loads((case.base / "config.json").read_text())
    found = checked(case, tmp_path, case.right(torch.bfloat16), {**config, "dtype": "bfloat16", "model_name": "x"})
    assert (found.verdict, kinds(found)) == ("consistent", [])
