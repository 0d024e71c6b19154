"""Loading base and adapter."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
from safetensors.torch import load_file, save_file

from consistency.errors import InputError
from consistency.worker.model.loading import load_adapter, load_base
from tests.worker.model.made_models import case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


def test_a_file_without_a_tensor_that_its_config_asks_for_is_told_so(llama: Path) -> None:
    adapter = on_llama(llama, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith("lm_head.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, metadata={"format": "pt"})
    case = case_of(llama, adapter)
    with pytest.raises(InputError, match="the adapter's file lacks a tensor that its config asks for") as caught:
        load_adapter(load_base(case, "cpu"), case)
    assert caught.value.got == f"no {lost}"
