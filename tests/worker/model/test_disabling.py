"""Disabling an adapter, and where PEFT does not."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers

from consistency.worker.model.merging import DisableRefusedError, disabled
from tests.worker.conftest import Look
from tests.worker.model.made_models import SIZES, adapter_on

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


def classifier() -> transformers.BertForSequenceClassification:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))


def test_a_prompt_on_a_model_that_does_not_generate_is_not_disabled() -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")
    model = peft.get_peft_model(classifier(), config)
    with pytest.raises(DisableRefusedError, match="UnboundLocalError"), disabled(model):
        pass


def test_an_error_inside_is_not_one_of_disabling() -> None:
    model = peft.get_peft_model(classifier(), peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))
    with pytest.raises(ZeroDivisionError), disabled(model):
        raise ZeroDivisionError


def test_the_other_passes_of_such_a_model_are_compared(tmp_path: Path, look: Look) -> None:
    classifier().save_pretrained(tmp_path / "bert")
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")
    adapter = adapter_on(classifier(), config, tmp_path / "adapter")
    found = look(tmp_path / "bert", adapter, stages=("merged", "forward"))
    by_mode = {r.tensor: (r.status, r.reason) for r in found if r.stage == "forward"}
    assert by_mode["adapter_on"][0] == "within"
    status, reason = by_mode["adapter_off"]
    assert status == "skipped"
    assert reason is not None
    assert reason.startswith("PEFT does not disable this adapter: UnboundLocalError")
    (merged,) = (r for r in found if r.stage == "merged")
    assert merged.status == "skipped"
    assert merged.reason == "this adapter adds nothing to a weight: there is nothing to merge"
