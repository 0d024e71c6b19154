from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from consistency.comparison.result import Finding
from consistency.extras.merging.diff.weights import diff_weights, find_settings

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def settings_of(tmp_path: Path, actual: dict[str, Any] | None, expected: dict[str, Any] | None) -> list[Finding]:
    for name, table in (("b", actual), ("a", expected)):
        (tmp_path / name).mkdir()
        if table is not None:
            (tmp_path / name / "adapter_config.json").write_text(json.dumps(table))
    return list(find_settings(tmp_path / "b", tmp_path / "a", ("b", "a")))


def test_equal_settings_are_no_finding(tmp_path: Path) -> None:
    assert settings_of(tmp_path, dict(reversed(LORA.items())), LORA) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora_alpha": 32}, "lora_alpha is 32, was 16"),
        ({"target_modules": ["q_proj"]}, "target_modules is ['q_proj'], was ['q_proj', 'v_proj']"),
        ({"use_rslora": True}, "use_rslora is True, was None"),
        ({"r": True}, "r is True, was 8"),
    ],
)
def test_what_changes_numbers_is_an_error(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (found,) = settings_of(tmp_path, LORA | change, LORA)
    assert (found.kind, found.severity, found.workers) == ("settings", "error", ("b",))
    assert said in found.message


def test_the_order_of_names_and_where_it_came_from_change_no_number(tmp_path: Path) -> None:
    other = LORA | {
        "target_modules": ["v_proj", "q_proj"],
        "base_model_name_or_path": "/elsewhere",
        "peft_version": "1",
    }
    (found,) = settings_of(tmp_path, other, LORA)
    assert (found.severity, "target_modules" in found.message) == ("note", False)
    assert "peft_version is '1', was None" in found.message


def test_a_file_of_one_side_alone_is_an_error(tmp_path: Path) -> None:
    (found,) = settings_of(tmp_path, LORA, None)
    assert (found.severity, found.message) == ("error", "only b has adapter_config.json")


def test_files_have_no_settings(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).touch()
    assert list(find_settings(tmp_path / "b.safetensors", tmp_path / "a.safetensors", ("b", "a"))) == []


def test_another_tokenizer_is_noted(tmp_path: Path) -> None:
    """Equal weights that read another text were equal, without a word."""
    for name, ids in (("a", "{}"), ("b", "[]")):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"x": np.zeros(2, np.float32)}, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text(ids)
        (folder / "generation_config.json").write_text("{}")
    found = diff_weights(tmp_path / "b", tmp_path / "a")
    (note,) = (one for one in found.findings if "tokenizer" in one.message)
    assert (found.verdict, note.severity) == ("consistent", "note")
