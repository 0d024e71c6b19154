"""Weights that no file holds are the same on every worker."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers

from consistency.worker.model.head_class import overwrite, synthetic
from consistency.worker.model.loading import load_base
from tests.worker.model.made_models import adapter_on, case_of

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


def test_numbers_that_are_made_depend_on_the_name_alone(masked_bert: Path) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(masked_bert, num_labels=5)
    case = case_of(masked_bert, adapter_on(model, peft.LoraConfig(target_modules=["query"]), masked_bert / "adapter"))
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loaded = load_base(case, "cpu")
        assert "classifier.weight" in loaded.not_in_file
        weights.append(loaded.tensors["classifier.weight"])
    assert torch.equal(*weights)
    assert torch.equal(weights[0], synthetic("classifier.weight", weights[0]))
    assert not torch.equal(weights[0], synthetic("score.weight", weights[0]))
    assert 0.01 < float(weights[0].detach().std()) < 0.03


def test_a_weight_that_shares_its_storage_with_a_loaded_one_is_left_alone() -> None:
    a, b, c, d = (torch.nn.Linear(4, 4, bias=False) for _ in range(4))
    b.weight, d.weight = a.weight, c.weight
    before = a.weight.detach().clone()
    model = torch.nn.ModuleDict({"a": a, "b": b, "c": c, "d": d})
    assert overwrite(model, ["d.weight", "c.weight", "b.weight"]) == {"c.weight"}
    assert torch.equal(a.weight, before)
    assert torch.equal(d.weight, synthetic("c.weight", before))
