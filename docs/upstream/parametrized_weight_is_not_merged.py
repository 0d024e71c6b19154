"""PEFT: a merge into a weight that torch computes anew, as under weight norm, is lost without an error.

Needs torch and peft, no download and no GPU:

    python parametrized_weight_is_not_merged.py
"""

import peft
import torch


class Model(torch.nn.Module):
    """A convolution whose weight is the product of a magnitude and a direction, as wav2vec2's positions have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve `(batch, 8, length)`."""
        return self.conv(x)


print(f"torch {torch.__version__}, peft {peft.__version__}")
for config in (
    peft.LoHaConfig(r=2, target_modules=["conv"], init_weights=False),
    peft.LoKrConfig(r=2, target_modules=["conv"], init_weights=False),
    peft.LoraConfig(r=2, target_modules=["conv"], init_lora_weights=False),
):
    torch.manual_seed(0)
    model = peft.get_peft_model(Model(), config).eval()
    x = torch.randn(1, 8, 16)
    with torch.no_grad():
        adapted = model(x)
        with model.disable_adapter():
            plain = model(x)
        for safe in (False, True):
            model.merge_adapter(safe_merge=safe)
            merged = model(x)
            print(
                f"{config.peft_type.value}, safe_merge={safe}: merged differs from unmerged by at most "
                f"{(merged - adapted).abs().max():.2g}, from the base by {(merged - plain).abs().max():.2g}"
            )
            model.unmerge_adapter()
