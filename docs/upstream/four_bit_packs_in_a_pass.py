"""bitsandbytes: a pass packs 4-bit weights anew on a CPU with AVX512-BF16, and what reads them then reads other values.

Needs torch, transformers, peft and bitsandbytes, no download and no GPU:

    python four_bit_packs_in_a_pass.py
"""

import logging
import platform
import tempfile
import warnings

import bitsandbytes as bnb
import peft
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, has_avx512bf16

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
transformers.utils.logging.disable_progress_bar()

SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
FOUR_BITS = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
IDS = torch.arange(16)[None]


def off(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Return a relative error."""
    return f"{float((actual - expected).norm() / expected.norm()):.2g}"


def adapted(folder: str) -> peft.PeftModel:
    """Load the base in 4 bits, and the adapter."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=FOUR_BITS)
    return peft.PeftModel.from_pretrained(model, f"{folder}/adapter").eval()


def layer() -> bnb.nn.Linear4bit:
    """Make one layer."""
    torch.manual_seed(0)
    kind = {"compress_statistics": False, "quant_type": "nf4"}
    found = bnb.nn.Linear4bit(256, 64, bias=False, compute_dtype=torch.float32, **kind)
    found.weight = bnb.nn.Params4bit(torch.randn(64, 256), requires_grad=False, module=found, **kind)
    return found.to("cpu").eval()


print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, "
      f"bitsandbytes {bnb.__version__}, {platform.machine()}, AVX512-BF16: {bool(has_avx512bf16())}")  # fmt: skip

one = layer()
weight = dequantize_4bit(one.weight.data, one.weight.quant_state)
x = torch.randn(4, 256)
with torch.no_grad():
    one(x)
print("one layer, relative errors after a forward pass in eval mode:")
print("  dequantize_4bit:", off(dequantize_4bit(one.weight.data, one.weight.quant_state), weight))

saved = one.state_dict()
state = {name.removeprefix("weight."): part for name, part in saved.items() if name.startswith("weight.")}
again = bnb.nn.Params4bit.from_prequantized(saved["weight"], state, device="cpu")
print("  dequantized from its state_dict:", off(dequantize_4bit(again.data, again.quant_state), weight))

one = layer()
with torch.no_grad():
    one(x)
inputs = x.clone().requires_grad_(True)
one.train()(inputs).sum().backward()
gradient = "none" if inputs.grad is None else off(inputs.grad, weight.sum(0).expand(4, -1))
print("  gradient of the inputs, in train mode:", gradient)

with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    plain.save_pretrained(folder)
    made = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.02)
    made.save_pretrained(f"{folder}/adapter")
    unmerged = adapted(folder)(IDS).logits
    for first in (False, True):
        model = adapted(folder)
        if first:
            model(IDS)
        merged = model.merge_and_unload().eval()(IDS).logits
        when = "after" if first else "before"
        print(f"merged by PEFT {when} the first pass, logits against unmerged:", off(merged, unmerged))
