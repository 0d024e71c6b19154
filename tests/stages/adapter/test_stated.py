"""What an adapter's config states that loading does not check."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model

from consistency.case.case import Case
from consistency.stages.adapter.stated import stated
from consistency.worker.context import Context

HUB = "hub/models--org--llama-7b/snapshots/0e9e39f2"


def found(
    tmp_path: Path, base: str, config: dict[str, Any], *, adapted: torch.nn.Module | None = None, **of_base: Any
) -> dict[str, Any]:
    (tmp_path / base).mkdir(parents=True)
    (tmp_path / base / "config.json").write_text(json.dumps({"model_type": "llama", **of_base}))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    case = Case(name="x", base=str(tmp_path / base), adapter=str(tmp_path / "adapter"))
    modules = torch.nn.Module() if adapted is None else adapted
    model = SimpleNamespace(peft_config={"default": LoraConfig()}, named_modules=modules.named_modules)
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
    tmp_path: Path, base: str, given: object, of_base: dict[str, Any]
) -> None:
    assert found(tmp_path, base, {"base_model_name_or_path": given}, **of_base) == {}


def test_another_base_is_named_with_this_one(tmp_path: Path) -> None:
    evidence = found(tmp_path, HUB, {"base_model_name_or_path": "Qwen/Qwen2-7B"})
    assert evidence == {"names_another_base": "Qwen2-7B, this one is llama-7b"}


def test_fields_that_peft_does_not_know_are_named_where_they_are_set(tmp_path: Path) -> None:
    fields = {"use_superlora": True, "a_later_default": None, "r": 8, "lora_alpha": 16}
    assert found(tmp_path, "base", fields) == {"ignored_fields": ["use_superlora"]}


class Experts(torch.nn.Module):
    """Three experts, each a matrix of (out, in); transposed ones are of (in, out)."""

    def __init__(self, features: int, *, transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.gate_up = torch.nn.Parameter(torch.zeros(3, 8, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.gate_up[0].mT


@pytest.mark.parametrize(
    ("saved_by", "experts", "said"),
    [
        ("0.18.1", Experts(8), True),
        ("0.18.2.dev0", Experts(8), True),
        ("0.18.1", Experts(8, transposed=True), False),
        ("0.19.0", Experts(8), True),
        ("0.19.0", Experts(8, transposed=True), True),
        ("0.19.1", Experts(8), False),
        (peft.__version__, Experts(8, transposed=True), False),
        ("unknown", Experts(8), False),
        (None, Experts(8), False),
        ("0.18.1", Experts(16), False),  # loading fails
    ],
)
def test_square_experts_that_an_older_peft_saved_are_of_another_layout(
    tmp_path: Path, saved_by: str | None, experts: Experts, said: bool
) -> None:
    config = LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up"])
    adapted = get_peft_model(torch.nn.ModuleDict({"experts": experts}), config)
    evidence = found(tmp_path, "base", {"peft_version": saved_by}, adapted=adapted)
    name = "PEFT {} saved the experts of base_model.model.experts"
    assert evidence == ({"older_layout": name.format(saved_by)} if said else {})
