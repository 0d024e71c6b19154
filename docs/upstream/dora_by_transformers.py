"""transformers: `model.load_adapter` leaves a DoRA adapter's magnitudes at their initial values, with only a warning.

Needs torch, transformers and peft, no download and no GPU:

    python dora_by_transformers.py
"""

import tempfile

import peft
import torch
import transformers
from safetensors.torch import load_file


def base() -> torch.nn.Module:
    """Make a model of two layers, the same every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config).eval()


transformers.logging.set_verbosity_error()
with tempfile.TemporaryDirectory() as folder:
    adapted = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:  # as training would
                parameter.add_(torch.rand_like(parameter))
    adapted.save_pretrained(folder)
    file = load_file(f"{folder}/adapter_model.safetensors")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    print("in the file:", ", ".join(name for name in file if "layers.0" in name))
    by_peft = peft.PeftModel.from_pretrained(base(), folder)
    by_transformers = base()
    info = by_transformers.load_adapter(folder)
    print(f"transformers reports {len(info.missing_keys)} missing and {len(info.unexpected_keys)} unexpected keys:")
    print(*sorted({*info.missing_keys, *info.unexpected_keys}), sep="\n")
    for title, model in (("PEFT", by_peft), ("transformers", by_transformers)):
        held = {
            name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight"): tensor
            for name, tensor in model.state_dict().items()
        }
        for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
            names = [name for name in file if part in name]
            there = [held[name.removeprefix("base_model.model.").removesuffix(".weight")] for name in names]
            equal = sum(torch.equal(tensor, file[name]) for tensor, name in zip(there, names, strict=True))
            print(f"{title:12} {part:21} {equal}/{len(names)} equal to the file")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        apart = (by_peft(ids).logits - by_transformers(ids).logits).abs().max()
    print(f"logits of the two differ by at most {apart:.2g}")
