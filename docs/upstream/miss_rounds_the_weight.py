"""Merge a MiSS adapter of zeros in bfloat16 into a float32 weight, which has to stay as it is. PEFT alone."""

import peft
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(48, 48, bias=False))
weight = model[0].weight.detach().clone()
for mode in (True, "bat", "mini"):
    fresh = torch.nn.Sequential(torch.nn.Linear(48, 48, bias=False))
    fresh[0].weight.data = weight.clone()
    config = peft.MissConfig(r=8, mini_r=8, target_modules=["0"], init_weights=mode)
    adapted = peft.get_peft_model(fresh, config, autocast_adapter_dtype=False)
    layer = adapted.base_model.model[0]
    block = layer.miss_block["default"]
    block.data = torch.zeros_like(block, dtype=torch.bfloat16)
    shape = tuple(block.shape)
    layer.merge()
    changed = (layer.get_base_layer().weight - weight).abs().max()
    print(f"init_weights={mode!r}: zeros change the weight by {changed:.2g}; miss_block was {shape}, is "
          f"{tuple(layer.miss_block['default'].shape)}")  # fmt: skip
print(f"torch {torch.__version__}, peft {peft.__version__}")
