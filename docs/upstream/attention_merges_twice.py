"""PEFT: a LoRA on torch's MultiheadAttention adds the delta of `out_proj` twice, and moves the base with each pass.

Needs torch and peft, no download and no GPU:

    python attention_merges_twice.py
"""

import peft
import torch


class Model(torch.nn.Module):
    """One attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to itself."""
        return self.attention(x, x, x)[0]


print(f"torch {torch.__version__}, peft {peft.__version__}")
config = peft.LoraConfig(r=2, target_modules=["attention"], init_lora_weights=False)
model = peft.get_peft_model(Model(), config).eval()
layer = model.base_model.model.attention
weight = layer.base_layer.in_proj_weight.detach().clone()
x = torch.randn(2, 5, 16)
with torch.no_grad():
    found = model(x)
    moved = (layer.base_layer.in_proj_weight - weight).abs().max()
    print(f"after one pass in_proj_weight is off by at most {float(moved):.2g}")
    delta, out = layer.get_delta_weight("default"), layer.base_layer.out_proj.get_delta_weight("default")
    for times in (1, 2):
        by_hand = Model().eval()
        by_hand.attention.in_proj_weight += delta
        by_hand.attention.out_proj.weight += times * out
        largest = float((by_hand(x) - found).abs().max())
        print(f"against weights merged by hand, the delta of out_proj {times} times: at most {largest:.2g}")
