"""What lies beside right weights and is not the base's: settings, the end of text, the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from consistency.comparison.result import Comparison, Finding
from consistency.extras.merging.check_merged.result import check_merged
from tests.extras.merging.check_merged.made_merges import Case, kinds, llama, write

ROPE = {"rope_theta": 500000.0, "rope_type": "default"}
TOKENIZER = {"added_tokens": [{"id": 3, "content": "<end>"}], "model": {"vocab": {"a": 0, "b": 1, "c": 2}}}


def made(folder: Path) -> Case:
    """Return a base with a tokenizer, a chat template and two ends of text."""
    case = llama(folder)
    change(case.base / "config.json", rope_parameters=ROPE, eos_token_id=2, dtype="float32")
    write_json(case.base / "generation_config.json", {"eos_token_id": [2, 7], "transformers_version": "4.40"})
    write_json(case.base / "tokenizer.json", TOKENIZER)
    write_json(case.base / "tokenizer_config.json", {"chat_template": "{{ messages }}", "model_max_length": 64})
    return case


def write_json(file: Path, table: dict[str, Any]) -> None:
    file.write_text(json.dumps(table))


def change(file: Path, **settings: Any) -> None:
    write_json(file, {**json.loads(file.read_text()), **settings})


def merged(case: Case) -> Path:
    """Write a right merge with all that lies beside the base."""
    folder = write(case.base.parent / "merged", case.right())
    for file in case.base.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def settings_of(case: Case, folder: Path) -> list[Finding]:
    return [one for one in check(case, folder).findings if one.kind == "settings"]


def check(case: Case, folder: Path) -> Comparison:
    return check_merged(folder, base=case.base, adapter=case.adapter)


def test_the_same_beside_is_no_finding(tmp_path: Path) -> None:
    case = made(tmp_path)
    assert settings_of(case, merged(case)) == []


def test_another_rope_is_an_error_with_both_values(tmp_path: Path) -> None:
    case = made(tmp_path)
    folder = merged(case)
    change(folder / "config.json", rope_parameters={**ROPE, "rope_theta": 10000.0})
    found = check(case, folder)
    assert (found.exit_status, kinds(found)) == (1, ["settings"])
    assert "rope_parameters.rope_theta is 10000.0, was 500000.0" in found.findings[0].message
    assert [one.severity for one in check_merged(folder, base=case.base).findings if one.kind == "settings"] == ["note"]


def test_the_same_rope_in_the_words_of_an_earlier_version(tmp_path: Path) -> None:
    case = made(tmp_path)
    folder = merged(case)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    write_json(folder / "config.json", {**config, "rope_theta": 500000.0, "torch_dtype": "float32", "use_cache": False})
    assert settings_of(case, folder) == []


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"attention_dropout": 0.1}, {"pad_token_id": 5}])
def test_what_a_writer_may_choose_is_a_note_at_most(tmp_path: Path, settings: dict[str, Any]) -> None:
    case = made(tmp_path)
    folder = merged(case)
    change(folder / "config.json", **settings)
    found = check(case, folder)
    assert (found.exit_status, kinds(found)) == (0, [])


def test_weights_that_loading_rounds_are_noted(tmp_path: Path) -> None:
    case = made(tmp_path)
    folder = merged(case)
    change(folder / "config.json", dtype="bfloat16")
    (note,) = settings_of(case, folder)
    assert "config.json says bfloat16, and the weights are float32" in note.message


def test_an_end_of_text_that_is_lost_is_a_warning(tmp_path: Path) -> None:
    case = made(tmp_path)
    folder = merged(case)
    change(folder / "generation_config.json", eos_token_id=2)
    warning, note = settings_of(case, folder)
    assert (warning.severity, check(case, folder).exit_status) == ("warning", 0)
    assert "generation ends at token 2, that of the base at 2 or 7" in warning.message
    assert "eos_token_id is 2, was [2, 7]" in note.message
    change(folder / "generation_config.json", eos_token_id=[7, 2, 9])
    assert [one.severity for one in settings_of(case, folder)] == ["note"]


def test_a_lost_tokenizer_and_template_are_noted(tmp_path: Path) -> None:
    case = made(tmp_path)
    folder = merged(case)
    change(folder / "tokenizer_config.json", chat_template=None)
    (note,) = settings_of(case, folder)
    assert (note.severity, note.message) == ("note", "the folder has no chat template, which the base has")
    change(folder / "tokenizer_config.json", chat_template="{{ message }}")
    (note,) = settings_of(case, folder)
    assert "chat template of the folder differs: from character 10 on it is ' }}', was 's }}'" in note.message
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    messages = [one.message for one in settings_of(case, folder)]
    assert messages[0].startswith("generation ends at token 2")
    assert "the folder has no tokenizer, which the base has" in messages


def test_a_tokenizer_is_compared_by_its_tokens(tmp_path: Path) -> None:
    case = made(tmp_path)
    folder = merged(case)
    table = json.loads((folder / "tokenizer.json").read_text())
    write_json(folder / "tokenizer.json", {"version": "1.0", **table})
    assert settings_of(case, folder) == []
    table["model"]["vocab"] = {"a": 1, "b": 0, "d": 2}
    write_json(folder / "tokenizer.json", table)
    (note,) = settings_of(case, folder)
    expected = "2 tokens with another id, such as 'a': 1, was 0; 1 token more: 'd'; 1 token fewer: 'c'"
    assert note.message == f"tokenizer.json of the folder differs: {expected}"
