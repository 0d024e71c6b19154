"""What CUDA's kernels do otherwise than the CPU's, and as rightly: rounding of running sums, order of sets."""

from __future__ import annotations

import torch

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Put the kernels in the place of the CPU's."""

    def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Add in float32; the CPU adds in float64."""
        host = x.cpu().to(dtype or (torch.int64 if not x.is_floating_point() else x.dtype))
        if not host.is_floating_point() or host.dim() == 0:
            return host.cumsum(dim, dtype=host.dtype).to(x.device)
        total, steps = torch.zeros_like(host.select(dim, 0), dtype=torch.float32), []
        for place in range(host.shape[dim]):
            total = total + host.select(dim, place)
            steps.append(total)
        return torch.stack(steps, dim).to(host.dtype).to(x.device)

    def topk(
        x: torch.Tensor,
        k: int,
        dim: int = -1,
        largest: bool = True,
        sorted: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort only where that is asked for: `gatherTopK` writes what it selects in the order of its places."""
        values, indices = torch.topk(x.cpu(), k, dim, largest, True)
        if not sorted:
            indices, order = indices.sort(dim)
            values = values.gather(dim, order)
        return values.to(x.device), indices.to(x.device)

    _library.impl("cumsum", cumsum, "PrivateUse1")
    _library.impl("topk", topk, "PrivateUse1")
