"""PEFT: `low_cpu_mem_usage=True` rounds a float32 adapter through the dtype of the base, and calls it float32.

Needs torch, transformers and peft, no download and no GPU:

    python low_cpu_mem_usage_rounds.py
"""

import tempfile

import peft
import torch
import transformers
from safetensors.torch import load_file


def base(dtype: torch.dtype) -> torch.nn.Module:
    """Make a model of two layers, the same every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


with tempfile.TemporaryDirectory() as folder:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base(torch.float32), config).save_pretrained(folder)
    file = load_file(f"{folder}/adapter_model.safetensors")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    print(f"the file holds {len(file)} tensors in {sorted({str(t.dtype) for t in file.values()})}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for low in (False, True):
            model = peft.PeftModel.from_pretrained(base(dtype), folder, low_cpu_mem_usage=low)
            held = {name.replace(".default", ""): t for name, t in model.state_dict().items() if "lora_" in name}
            equal = sum(torch.equal(held[name], file[name]) for name in file)
            rounded = sum(torch.equal(held[name], file[name].to(dtype).float()) for name in file)
            largest = max(float((held[name] - file[name]).abs().max()) for name in file)
            dtypes = sorted({str(t.dtype) for t in held.values()})
            print(
                f"{dtype!s:14} low_cpu_mem_usage={low!s:5} adapter {dtypes}: {equal}/{len(file)} equal to the file, "
                f"{rounded}/{len(file)} to the file through the base's dtype, largest difference {largest:.2g}"
            )
