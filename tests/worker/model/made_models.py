"""Small models and adapters made on the spot, with weights that are no initial values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from consistency.case.builtin import builtin_folder
from consistency.case.case import Case

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def a_llama(**changes: Any) -> Any:
    """Return a Llama of one layer, which has half as many keys as queries."""
    sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def saved(model: Any, folder: Path) -> Path:
    perturb(model)
    model.save_pretrained(folder)
    return folder


def perturb(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def adapter_on(model: Any, config: Any, folder: Path) -> Path:
    adapted = peft.get_peft_model(model, config)
    perturb(adapted)
    adapted.create_or_update_model_card = lambda _: None  # nobody reads it, and writing it takes as long as the rest
    adapted.save_pretrained(folder)
    return folder


def on_llama(base: Path, config: Any) -> Path:
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    return adapter_on(model, config, base.parent / "adapter")


def case_of(base: Path, adapter: Path | None, **changes: Any) -> Case:
    fields = {"name": "x", "base": str(base), "adapter": None if adapter is None else str(adapter), "dtype": "float32"}
    return Case(**{**fields, **changes})


def t5_with_units_at_zero(folder: Path, layers: int) -> tuple[Path, Path]:
    """Return the base and adapter of a T5 whose ReLUs decide for two units each whose value is exactly zero."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_decoder_layers=layers, num_heads=4,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    perturb(model)
    _zero_units(model, ".wi.weight")
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q", "v", "wi"], task_type="SEQ_2_SEQ_LM"))
    perturb(adapted)
    _zero_units(adapted, ".wi.lora_B.default.weight")
    adapted.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def _zero_units(model: torch.nn.Module, ending: str) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ending):
                parameter[:2] = 0


def a_model() -> Any:
    """Return a model that no file holds."""
    torch.manual_seed(0)
    return a_llama()


class Block(torch.nn.Module):
    """Torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.attention(x, x, x)[0]
        return x + mixed


class Attention(torch.nn.Module):
    """Two blocks, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.out = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.out(x)
        return result


def an_attention() -> torch.nn.Module:
    """Return a model with attention of torch's."""
    torch.manual_seed(0)
    return Attention()


def a_llama_that_does_not_run() -> torch.nn.Module:
    """Return a model whose code raises torch's error for a shape on any inputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(builtin_folder("llama") / "base")
    model.register_forward_pre_hook(lambda *_: torch.ones(7).view(3, -1))
    assert isinstance(model, torch.nn.Module)
    return model


def a_plain_module() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    module.register_buffer("turns", torch.ones(2, dtype=torch.complex64), persistent=False)
    return module


def a_factory_that_fails() -> torch.nn.Module:
    raise ZeroDivisionError("in the user's own code")
