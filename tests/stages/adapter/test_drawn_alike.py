"""A tensor that was never loaded is named, whatever seed the adapter was drawn from."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers

from consistency.numerics import words
from consistency.worker.faults import plant
from tests.worker.conftest import Look


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_the_worker_does_not_draw_the_adapter_that_it_did_not_load(llama: Path, look: Look, tmp_path: Path) -> None:
    """A script that trains lora_B alone leaves lora_A as PEFT drew it, here from the seed that most scripts take."""
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    with plant("adapter-copy-dropped"):
        records = look(llama, tmp_path / "adapter", stages=("adapter",))
    found = {(record.layer, record.tensor): record.word for record in records if record.word}
    assert found == {("model.layers.0.self_attn.q_proj", "lora_A"): words.FRESH_INIT}
