"""PEFT: an X-LoRA of two adapters is saved without its classifier.

Needs torch, transformers and peft, no download and no GPU:

    python xlora_saves_nothing.py
"""

import tempfile
from pathlib import Path

import peft
import safetensors
import torch
import transformers


def base() -> torch.nn.Module:
    """Make a model of one layer, the same every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def saved(folder: Path) -> list[str]:
    """Return the names of the tensors in an adapter's file."""
    with safetensors.safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return list(file.keys())


print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
with tempfile.TemporaryDirectory() as home:
    folders = {name: Path(home, name) for name in ("first", "second")}
    for folder in folders.values():
        peft.get_peft_model(base(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=32, adapters={name: str(folder) for name, folder in folders.items()}
    )
    model = peft.get_peft_model(base(), config)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.save_pretrained(Path(home, "mixture"))
    print(f"trained: {trained}")
    print(f"adapters by their names in the model: {list(model.peft_config)}")
    print(f"saved: {saved(Path(home, 'mixture'))}")
