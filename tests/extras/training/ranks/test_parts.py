"""What each rank holds of a tensor."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from consistency.extras.training.ranks.parts import RankPart, gather, local_part, part_of, put_together

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def split(shape: tuple[int, ...], dim: int, world: int) -> list[RankPart]:
    """Return the parts of ranks as torch.chunk gives them."""
    rows = -(-shape[dim] // world)
    starts = [min(shape[dim], rank * rows) for rank in range(world + 1)]
    return [RankPart(whole=shape, dim=dim, start=start, stop=stop) for start, stop in itertools.pairwise(starts)]


@given(shape=SHAPES, dim=st.integers(0, 2), world=st.integers(2, 5))
def test_the_parts_of_all_ranks_are_the_tensor(shape: tuple[int, ...], dim: int, world: int) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    parts = split(shape, dim % len(shape), world)
    own = [part.cut_from(tensor) for part in parts]
    assert [tuple(one.shape) for one in own] == [part.shape for part in parts]
    assert torch.equal(put_together(own, parts[0]), tensor)
    passes = torch.stack([tensor, tensor + 1])
    assert torch.equal(torch.cat([part.cut_from(passes, leading=1) for part in parts], 1 + dim % len(shape)), passes)


def test_a_plain_tensor_is_held_by_every_rank() -> None:
    tensor = torch.ones(3, 4)
    part = part_of(tensor, rank=1, world=2)
    assert (part.dim, part.shape) == (None, (3, 4))
    assert torch.equal(part.cut_from(tensor), tensor)
    assert torch.equal(local_part(tensor), gather(tensor))
    assert torch.equal(put_together([tensor, tensor], part), tensor)
