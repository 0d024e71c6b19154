"""Kernels that CUDA has and the CPU has not, so that there is nothing to fall back to."""

from __future__ import annotations

import torch

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Count whole numbers, as the experts of transformers do."""

    def histc(x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> torch.Tensor:
        return torch.histc(x.cpu().double(), bins, low, high).to(x.dtype).to(x.device)

    _library.impl("histc", histc, "PrivateUse1")
