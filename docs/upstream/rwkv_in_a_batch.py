"""Compute the last token of a batch of RWKV with its state, and without: transformers adds up the states of the batch.

python docs/upstream/rwkv_in_a_batch.py
"""

import torch
import transformers

print(f"torch {torch.__version__}, transformers {transformers.__version__}")
torch.manual_seed(0)
config = transformers.RwkvConfig(
    vocab_size=64, hidden_size=32, attention_hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    context_length=64,
)  # fmt: skip
model = transformers.RwkvForCausalLM(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.05)
ids = torch.randint(3, 60, (2, 9))
for batch in (ids[:1], ids):
    with torch.no_grad():
        whole = model(batch, use_cache=False).logits[:, -1]
        state = model(batch[:, :-1], use_cache=True).state
        step = model(batch[:, -1:], state=state, use_cache=True)
        hidden = model.rwkv.blocks[0](torch.ones(len(batch), 1, 32), state=state, use_cache=True)[0]
    off = float((step.logits[:, -1] - whole).abs().max())
    print(f"{len(batch)} sequences: logits with the state are off by {off:.2g}; a block gives {list(hidden.shape)}")
