"""PEFT: LoKr on Conv1d takes its Kronecker product over other dimensions than on Conv2d.

Needs torch and peft, no download and no GPU:

    python lokr_on_conv1d.py
"""

import peft
import torch


def delta(layer: torch.nn.Module, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Return what LoKr with these two factors adds to the weight of a convolution, by PEFT's own code."""
    # with this rank, PEFT decomposes neither of the factors
    config = peft.LoKrConfig(r=8, alpha=8, target_modules=["0"])
    tuned = peft.get_peft_model(torch.nn.Sequential(layer), config).base_model.model[0]
    with torch.no_grad():
        tuned.lokr_w1["default"].copy_(w1)
        tuned.lokr_w2["default"].copy_(w2.reshape(tuned.lokr_w2["default"].shape))
        return tuned.get_delta_weight("default").detach()


print(f"torch {torch.__version__}, peft {peft.__version__}")
torch.manual_seed(0)
for kernel in (1, 3):
    w1, w2 = torch.randn(2, 2), torch.randn(4, 4, kernel)
    one = delta(torch.nn.Conv1d(8, 8, kernel), w1, w2)
    two = delta(torch.nn.Conv2d(8, 8, (kernel, 1)), w1, w2).squeeze(-1)
    # LyCORIS and the paper: one product per position of the kernel, over the channels
    wanted = torch.stack([torch.kron(w1, w2[:, :, at]) for at in range(kernel)], dim=-1)
    # the blocks of a Kronecker product are multiples of one matrix
    blocks = one[:, :, 0].reshape(2, 4, 2, 4).permute(0, 2, 1, 3).reshape(4, 16)
    print(
        f"kernel of {kernel}: the delta differs from the product over channels by at most "
        f"{(one - wanted).abs().max():.2g} as Conv1d, by {(two - wanted).abs().max():.2g} as Conv2d of {kernel} x 1; "
        f"its blocks have {torch.linalg.matrix_rank(blocks)} directions instead of 1"
    )
