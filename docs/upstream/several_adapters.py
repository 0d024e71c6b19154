"""PEFT: hotswap loses `alpha_pattern` and clears other adapters; `add_weighted_adapter` scales rsLoRA twice.

Needs torch, transformers and peft, no download and no GPU:

    python several_adapters.py
"""

import tempfile
from typing import Any

import peft
import torch
import transformers
from peft.utils.hotswap import hotswap_adapter

IDS = torch.arange(8).reshape(1, 8)


def base() -> Any:
    """Make a model of two layers, the same every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config).eval()


def delta(layer: Any, name: str) -> torch.Tensor:
    """Return what an adapter adds to a layer's weight."""
    return layer.get_delta_weight(name)


def hotswap() -> None:
    """Swap an adapter for itself, so that nothing may change."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], alpha_pattern={"q_proj": 16}, init_lora_weights=False
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        peft.get_peft_model(base(), config).save_pretrained(folder)
        model = peft.PeftModel.from_pretrained(base(), folder).eval()
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        before, scaling = model(IDS).logits, layer.scaling["default"]
        hotswap_adapter(model, folder, adapter_name="default")
        moved = float((model(IDS).logits - before).abs().max())
        now = layer.scaling["default"]
        print(f"hotswap with itself: scaling {scaling:g} becomes {now:g}, logits move by {moved:.2g}")


def hotswap_beside_another() -> None:
    """Swap an adapter for itself while another one is loaded whose name contains its name."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        peft.get_peft_model(base(), config).save_pretrained(folder)
        model = peft.PeftModel.from_pretrained(base(), folder)
        model.load_adapter(folder, adapter_name="default-2")
        hotswap_adapter(model, folder, adapter_name="default")
        others = [t for name, t in model.named_parameters() if ".default-2." in name]
        zeros = sum(not bool(t.any()) for t in others)
        print(f"hotswap of default: {zeros} of {len(others)} tensors of the adapter default-2 are zeros now")


def combine(*, use_rslora: bool) -> None:
    """Add two adapters, each with weight 1."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], use_rslora=use_rslora, init_lora_weights=False
    )
    model = peft.get_peft_model(base(), config, adapter_name="one")
    model.add_adapter("two", config)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        wanted = delta(layer, "one") + delta(layer, "two")
        model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "sum", combination_type="cat")
        ratio = float(delta(layer, "sum").norm() / wanted.norm())
    print(f"add_weighted_adapter, cat, use_rslora={use_rslora}: the sum comes out {ratio:.4g} times as large")


print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
hotswap()
hotswap_beside_another()
for use_rslora in (False, True):
    combine(use_rslora=use_rslora)
