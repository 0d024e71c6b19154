"""Which parameters of a loaded adapter are expected, and what they should hold."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from consistency.worker.model.expected_adapter import expected_adapter, is_made_anew
from consistency.worker.model.loading import load_adapter, load_base
from consistency.worker.model.weight_files import WeightFiles
from tests.versions import needs_method
from tests.worker.model.made_models import case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


def test_looking_for_the_places_loads_nothing(llama: Path) -> None:
    adapter = on_llama(llama, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    case = case_of(llama, adapter)
    model = load_adapter(load_base(case, "cpu"), case).model
    name, prompt = next((n, p) for n, p in model.named_parameters() if n.startswith("prompt_encoder"))
    with torch.no_grad():
        prompt.zero_()
    assert list(expected_adapter(model, WeightFiles.of_adapter(str(adapter), allow_pickle=False))) == [name]
    assert not prompt.any()
    assert "load_state_dict" not in vars(model)


@needs_method("CartridgeConfig")
def test_a_prompt_that_its_method_takes_apart_is_compared_part_by_part(llama: Path) -> None:
    adapter = on_llama(llama, peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_frozen_tokens=1))
    case = case_of(llama, adapter)
    model = load_adapter(load_base(case, "cpu"), case).model
    parts = {name: p for name, p in model.named_parameters() if name.startswith("prompt_encoder")}
    assert len(parts) == 2
    with torch.no_grad():
        for part in parts.values():
            part.zero_()
    expected = expected_adapter(model, WeightFiles.of_adapter(str(adapter), allow_pickle=False))
    assert {name: key for name, (key, _) in expected.items()} == {
        "prompt_encoder.default.frozen_embedding": "prompt_embeddings.frozen_embedding",
        "prompt_encoder.default.trainable_embedding": "prompt_embeddings.trainable_embedding",
    }
    whole = load_file(adapter / "adapter_model.safetensors")["prompt_embeddings"]
    assert torch.equal(torch.cat([expected[name][1] for name in parts]), whole)
    assert not any(part.any() for part in parts.values()), "the device's own tensors were loaded again"


def test_what_peft_offers_without_the_adapters_name_is_made_anew() -> None:
    """PEFT before 0.21 does so with the projections of VeRA."""
    state = {"base_model.vera_A.default": torch.ones(2), "lora_A.default.weight": torch.ones(2)}
    assert is_made_anew(state, "base_model.vera_A")
    assert not is_made_anew(state, "base_model.vera_A", "other")
    assert not is_made_anew(state, "base_model.vera_A.default")
    assert not is_made_anew(state, "lora_B.default.weight")
