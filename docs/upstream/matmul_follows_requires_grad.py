"""torch and PEFT: `set_adapter` changes a model's logits, because `matmul` chooses its kernel by `requires_grad`.

Needs torch, transformers and peft, no download and no GPU:

    python matmul_follows_requires_grad.py
"""

import logging
import platform
import warnings

import peft
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

print(
    f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, {platform.machine()}"
)


class Recorded(TorchDispatchMode):
    """Collects the multiplications."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


torch.manual_seed(0)
x, weight = torch.randn(4, 64, 32).transpose(1, 2), torch.randn(4, 64)
results = []
for needed in (True, False):
    weight.requires_grad_(needed)
    with torch.no_grad(), Recorded() as recorded:
        results.append(torch.nn.functional.linear(x, weight))
    print(f"linear of a transposed input under no_grad, requires_grad={needed}: {', '.join(recorded.names)}")
print(f"bitwise equal: {torch.equal(*results)}, apart by at most {(results[0] - results[1]).abs().max():.2g}")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
HYBRID = {
    "num_key_value_heads": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
config = transformers.JambaConfig(**SIZES, **HYBRID)
lora = {"r": 4, "target_modules": ["out_proj"], "init_lora_weights": False}
model = peft.get_peft_model(transformers.JambaForCausalLM(config), peft.LoraConfig(**lora, inference_mode=True))
model.add_adapter("second", peft.LoraConfig(**lora, inference_mode=True))
model.eval().requires_grad_(False)  # as `PeftModel.from_pretrained` leaves it
ids = torch.arange(128).reshape(4, 32) % 64


def logits():
    """Run the model."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


before = logits()
model.set_adapter("second")
model.set_adapter("default")
after = logits()
print(
    f"Jamba, set_adapter to another adapter and back: bitwise equal {torch.equal(before, after)}, "
    f"apart by at most {(before - after).abs().max():.2g}"
)
model.requires_grad_(False)
print(f"the same with requires_grad_(False): bitwise equal {torch.equal(before, logits())}")
