"""The class of the head and its number of labels, from the adapter where it names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from consistency.worker.model.head_class import auto_class, labels
from tests.worker.model.made_models import adapter_on, case_of

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


@pytest.mark.parametrize(
    ("options", "auto"),
    [
        ({"task_type": "SEQ_CLS"}, "AutoModelForSequenceClassification"),
        ({"modules_to_save": ["classifier"]}, "AutoModelForSequenceClassification"),  # PEFT notes the class it saw
    ],
)
def test_the_head_follows_the_adapter(masked_bert: Path, options: dict[str, Any], auto: str) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(masked_bert, num_labels=5)
    adapter = adapter_on(model, peft.LoraConfig(target_modules=["query"], **options), masked_bert / "adapter")
    case, config = case_of(masked_bert, adapter), transformers.AutoConfig.from_pretrained(masked_bert)
    assert auto_class(config, case).__name__ == auto
    assert labels(config, case) == 5
    alone = case_of(masked_bert, None)
    assert (auto_class(config, alone).__name__, labels(config, alone)) == ("AutoModelForMaskedLM", None)
