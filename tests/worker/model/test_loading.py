"""Loading base and adapter, and which tensors of the adapter are expected."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch

from consistency.worker.model.loading import expected_adapter, load_adapter, load_base
from consistency.worker.model.weight_files import WeightFiles
from tests.worker.model.made_models import case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


def test_looking_for_the_places_loads_nothing(llama: Path) -> None:
    adapter = on_llama(llama, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    case = case_of(llama, adapter)
    model = load_adapter(load_base(case, "cpu"), case)
    name, prompt = next((n, p) for n, p in model.named_parameters() if n.startswith("prompt_encoder"))
    with torch.no_grad():
        prompt.zero_()
    assert list(expected_adapter(model, WeightFiles.of_adapter(str(adapter), allow_pickle=False))) == [name]
    assert not prompt.any()
    assert "load_state_dict" not in vars(model)
