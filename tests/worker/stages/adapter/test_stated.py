"""What an adapter's config states that loading does not check."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from peft import LoraConfig

from consistency.case.case import Case
from consistency.worker.stages.adapter.stated import stated
from consistency.worker.stages.context import Context

HUB = "hub/models--org--llama-7b/snapshots/0e9e39f2"


def found(tmp_path: Path, base: str, config: dict[str, Any], **of_base: Any) -> dict[str, Any]:
    (tmp_path / base).mkdir(parents=True)
    (tmp_path / base / "config.json").write_text(json.dumps({"model_type": "llama", **of_base}))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    case = Case(name="x", base=str(tmp_path / base), adapter=str(tmp_path / "adapter"))
    model = SimpleNamespace(peft_config={"default": LoraConfig()})
    return stated(cast("Context", SimpleNamespace(job=SimpleNamespace(case=case), model=model)))


@pytest.mark.parametrize(
    ("base", "given", "of_base"),
    [
        ("llama-7b", "org/llama-7b", {}),
        ("llama-7b", "/data/models/llama-7b/", {}),
        (HUB, "org/llama-7b", {}),
        ("hub/models--gpt2/snapshots/0e9e39f2", "gpt2", {}),
        ("llama-7b", f"/elsewhere/{HUB}", {}),
        ("renamed", "org/llama-7b", {"_name_or_path": "other/llama-7b"}),
        ("llama-7b", None, {}),
        ("llama-7b", "", {}),
    ],
)
def test_the_base_of_the_config_is_known_by_its_name(
    tmp_path: Path, base: str, given: object, of_base: dict[str, str]
) -> None:
    assert found(tmp_path, base, {"base_model_name_or_path": given}, **of_base) == {}


def test_another_base_is_named_with_this_one(tmp_path: Path) -> None:
    evidence = found(tmp_path, HUB, {"base_model_name_or_path": "Qwen/Qwen2-7B"})
    assert evidence == {"names_another_base": "Qwen2-7B, this one is llama-7b"}


def test_fields_that_peft_does_not_know_are_named_where_they_are_set(tmp_path: Path) -> None:
    fields = {"use_superlora": True, "a_later_default": None, "r": 8, "lora_alpha": 16}
    assert found(tmp_path, "base", fields) == {"ignored_fields": ["use_superlora"]}
