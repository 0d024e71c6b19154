"""torchtune: an adapter of DoRA that it saves for PEFT has the magnitudes of q and k in another order than their rows.

Needs torch and torchtune, no download and no GPU:

    python torchtune_dora_order.py
"""

import importlib.metadata

import torch
from torchtune.models.convert_weights import tune_to_peft_adapter_weights

HEADS, HEAD_DIM, RANK = 2, 8, 2

# each row of B, and each magnitude, is the number of its output
outputs = torch.arange(float(HEADS * HEAD_DIM))
saved = tune_to_peft_adapter_weights(
    {
        "layers.0.attn.q_proj.lora_b.weight": outputs[:, None].expand(-1, RANK),
        "layers.0.attn.q_proj.magnitude": outputs,
    },
    num_heads=HEADS,
    num_kv_heads=HEADS,
    dim=HEADS * HEAD_DIM,
)
rows = saved["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"][:, 0]
magnitudes = saved["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"]
print(f"torch {torch.__version__}, torchtune {importlib.metadata.version('torchtune')}")
print(f"outputs of the rows of lora_B:  {[int(number) for number in rows]}")
print(f"outputs of the magnitudes:      {[int(number) for number in magnitudes]}")
