"""The part of a tensor that each rank holds: by FSDP2, by a tensor parallel plan, or the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The part of a tensor that one rank holds."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int | None
    """Dimension that the ranks split; None where each holds the whole tensor."""
    start: int
    """First row of the part, along `dim`."""
    stop: int
    """Row after the last one of the part; equal to `start` where there are fewer rows than ranks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if self.dim is None:
            return self.whole
        return (*self.whole[: self.dim], self.stop - self.start, *self.whole[self.dim + 1 :])

    def cut_from(self, tensor: torch.Tensor, *, leading: int = 0) -> torch.Tensor:
        """Return this part of a whole tensor, as a view.

        Parameters
        ----------
        leading : int
            Number of dimensions that the tensor has before its own, such as one of steps.
        """
        if self.dim is None:
            return tensor
        return tensor.narrow(leading + self.dim, self.start, self.stop - self.start)


def part_of(tensor: torch.Tensor, *, rank: int, world: int) -> RankPart:
    """Return the part of a rank: of a split tensor an equal number of rows, and the last ranks hold fewer or none.

    Raises
    ------
    ValueError
        The tensor is split in a way that this tool cannot put together.
    """
    whole = tuple(tensor.shape)
    placements = tensor.placements if isinstance(tensor, DTensor) else (Replicate(),)
    if placements == (Replicate(),):
        return RankPart(whole=whole, dim=None, start=0, stop=0)
    placement = placements[0] if len(placements) == 1 else None
    # no class derived from it: the rows of torch's `_StridedShard` are not neighbours
    if type(placement) is not Shard:
        raise ValueError(f"a tensor is split as {placements}, which this tool cannot put together")
    dim = placement.dim % len(whole)
    rows = -(-whole[dim] // world)  # rounded up, as torch.chunk does
    return RankPart(whole=whole, dim=dim, start=min(whole[dim], rank * rows), stop=min(whole[dim], (rank + 1) * rows))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, without its gradient."""
    values = tensor.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of this rank's part of a parameter, which a library may leave split in another way."""
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def put_together(parts: Sequence[torch.Tensor], part: RankPart) -> torch.Tensor:
    """Return a whole tensor from the parts of all ranks, in their order.

    Parameters
    ----------
    part : RankPart
        The part of any of the ranks.
    """
    return parts[0] if part.dim is None else torch.cat(list(parts), part.dim)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its gradient, gathered from all ranks where it is split."""
    values = tensor.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values
