"""Which part of a tensor each rank holds: by FSDP2, by a tensor parallel plan, or all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank holds of a tensor."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int | None
    """In which ranks split it; None where each holds all of it."""
    start: int
    stop: int
    """`start`, `stop`: along that dimension; equal where there are fewer rows than ranks."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.whole
        return (*self.whole[: self.dim], self.stop - self.start, *self.whole[self.dim + 1 :])

    def of(self, tensor: torch.Tensor, *, after: int = 0) -> torch.Tensor:
        """Return this part of a whole tensor, which has `after` dimensions more before its own."""
        return tensor if self.dim is None else tensor.narrow(after + self.dim, self.start, self.stop - self.start)


def part_of(tensor: torch.Tensor, *, rank: int, world: int) -> RankPart:
    """Return what a rank holds: of a split tensor an equal number of rows, and the last ranks what is left.

    Raises
    ------
    ValueError
        The tensor is split in a way that this tool cannot put together.
    """
    whole = tuple(tensor.shape)
    placements = tensor.placements if isinstance(tensor, DTensor) else (Replicate(),)
    if placements == (Replicate(),):
        return RankPart(whole=whole, dim=None, start=0, stop=0)
    (placement,) = placements if len(placements) == 1 else (None,)
    if type(placement) is not Shard:
        raise ValueError(f"a tensor is split as {placements}, which this tool cannot put together")
    dim = placement.dim % len(whole)
    rows = -(-whole[dim] // world)
    return RankPart(whole=whole, dim=dim, start=min(whole[dim], rank * rows), stop=min(whole[dim], (rank + 1) * rows))


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without its gradient."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def gradient_held(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of what this rank holds of a parameter, which a library may leave split in another way."""
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return held(gradient)


def put_together(parts: Sequence[torch.Tensor], part: RankPart) -> torch.Tensor:
    """Return a whole tensor from what the ranks hold, in their order; `part` is that of any of them."""
    return parts[0] if part.dim is None else torch.cat(list(parts), part.dim)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its gradient, gathered from all ranks where it is split."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found
