"""Compute one sequence with a Lily adapter, by itself, beside another one, and with another last token.

python docs/upstream/lily_mixes_a_batch.py
"""

import peft
import torch
import transformers

print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
)  # fmt: skip
model = peft.get_peft_model(
    transformers.LlamaForCausalLM(config), peft.LilyConfig(r=4, target_modules=["q_proj"])
).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lily" in name:
            parameter.normal_()
ids = torch.randint(3, 60, (2, 8))
later = ids[:1].clone()
later[0, -1] = 5
with torch.no_grad():
    alone = model(ids[:1]).logits[0]
    beside = float((model(ids).logits[0] - alone).abs().max())
    before = float((model(later).logits[0, -2] - alone[-2]).abs().max())
print(f"beside another sequence its logits are off by {beside:.2g}")
print(f"with another last token the logits of the one before are off by {before:.2g}")
