"""What decides results beside the weights, as a capture keeps it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from consistency.worker.model.sources import config_of, sources_of
from tests.worker.model.made_models import SIZES, case_of


def model_of(**settings: object) -> torch.nn.Module:
    module = torch.nn.Module()
    module.config = LlamaConfig(**{**SIZES, **settings})
    return module


def test_a_config_is_what_may_change_results() -> None:
    one = config_of(model_of())
    assert one["rope_parameters.rope_theta"] == 10000.0
    assert one == config_of(model_of(id2label={0: "a"}, dtype="bfloat16", use_cache=False, name_or_path="elsewhere"))
    assert one != config_of(model_of(rms_norm_eps=1e-5))
    assert config_of(torch.nn.Linear(1, 1)) == {}


def test_values_that_json_has_not_are_the_same_in_every_process() -> None:
    assert config_of(model_of(its_own=object()))["its_own"] == "object"


def test_an_edited_config_is_another_source(tmp_path: Path) -> None:
    case = case_of(tmp_path, tmp_path)
    digests = [sources_of(case)]
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
        digests.append(sources_of(case))
    assert len(set(digests)) == 3


def test_an_edited_factory_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told as failing hardware: a drift with the same inputs and software on every device."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("its_factory", "its_model", "another_module"):
        (tmp_path / f"{name}.py").write_text("def load(): ...\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "its_factory.py").write_text("import its_model\n")
    __import__("its_factory")
    case = case_of(Path("python:its_factory:load"), None)
    before = sources_of(case)
    (tmp_path / "another_module.py").write_text("1\n")
    assert sources_of(case) == before
    (tmp_path / "its_model.py").write_text("1\n")
    after = sources_of(case)
    (tmp_path / "its_factory.py").write_text("import its_model  # again\n")
    assert len({before, after, sources_of(case)}) == 3
