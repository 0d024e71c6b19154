"""What ranks have to get: the bound holds for any order of a sum and fails for anything else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from consistency.case.stage import Level
from consistency.extras.training.collectives.operations import (
    BLOCK,
    EVERY_COLLECTIVE,
    LARGEST_BYTES,
    SIZES,
    Collective,
    Contribution,
    groups_of,
)
from consistency.numerics.running_error import Sum

BY_NAME = {collective.name: collective for collective in EVERY_COLLECTIVE}


def numbers(collective: Collective, dtype: str, size: int, world: int) -> list[torch.Tensor]:
    return [one.whole() for one in collective.contributions(dtype, size, world)]


def expected(collective: Collective, dtype: str, size: int, world: int, rank: int = 0) -> torch.Tensor | Sum:
    return collective.expected(collective.contributions(dtype, size, world), rank)


def within(actual: torch.Tensor, expected: Sum) -> bool:
    return bool((np.abs(actual.double().numpy() - expected.value) <= expected.allowed).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["all_reduce.sum", "all_reduce.avg"])
@drawn(world=st.integers(2, 9), data=st.data())
def test_a_sum_in_any_order_is_within_its_bound(name: str, dtype: str, world: int, data: st.DataObject) -> None:
    host = numbers(BY_NAME[name], dtype, 64, world)
    order = data.draw(st.permutations(range(world)))
    first = data.draw(st.booleans())
    terms = [host[rank] / world if first and name.endswith("avg") else host[rank] for rank in order]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    if name.endswith("avg") and not first:
        total = total / world
    exact = expected(BY_NAME[name], dtype, 64, world)
    assert isinstance(exact, Sum)
    assert within(total, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_term_left_out_or_added_twice_is_outside(dtype: str) -> None:
    host = numbers(BY_NAME["all_reduce.sum"], dtype, 64, 3)
    exact = expected(BY_NAME["all_reduce.sum"], dtype, 64, 3)
    assert isinstance(exact, Sum)
    assert not within(host[0] + host[1], exact)
    assert not within(host[0] + host[1] + host[2] + host[2], exact)


def moved(name: str, dtype: str, size: int, world: int, rank: int) -> torch.Tensor:
    found = expected(BY_NAME[name], dtype, size, world, rank)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_whole_numbers_add_up_exactly(dtype: str) -> None:
    host = numbers(BY_NAME["all_reduce.sum"], dtype, 9, 3)
    assert torch.equal(moved("all_reduce.sum", dtype, 9, 3, 0), host[0] + host[1] + host[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "int8", "uint8"])
def test_each_rank_gets_its_own_part(dtype: str) -> None:
    host = numbers(BY_NAME["all_to_all"], dtype, 2, 3)
    for rank in range(3):
        parts = torch.cat([one[2 * rank : 2 * rank + 2] for one in host])
        assert torch.equal(moved("all_to_all", dtype, 2, 3, rank), parts)
    for name, of in (("send-receive", [2]), ("broadcast", [2]), ("all_gather", [0, 1, 2])):
        host = numbers(BY_NAME[name], dtype, 2, 3)
        assert torch.equal(moved(name, dtype, 2, 3, 0), torch.cat([host[rank] for rank in of]))


def test_ranks_give_different_numbers_and_the_same_ones_every_time() -> None:
    first, second = (Contribution(name="x", dtype="float32", elements=8, rank=rank) for rank in range(2))
    assert not torch.equal(first.whole(), second.whole())
    assert torch.equal(first.whole(), Contribution(name="x", dtype="float32", elements=8, rank=0).whole())


@drawn(start=st.integers(0, BLOCK + 3), length=st.integers(0, BLOCK + 3))
def test_any_part_is_that_of_the_whole(start: int, length: int) -> None:
    given = Contribution(name="x", dtype="int8", elements=2 * BLOCK + 7, rank=1)
    stop = min(start + length, given.elements)
    assert torch.equal(given.between(start, stop), given.whole()[start:stop])


@pytest.mark.parametrize("name", ["all_reduce.sum", "all_reduce.avg", "all_reduce.max", "reduce_scatter.sum"])
def test_what_is_expected_block_by_block_is_that_of_the_whole(name: str) -> None:
    collective, size = BY_NAME[name], BLOCK + 5
    whole = torch.stack(numbers(collective, "float32", size, 2))
    whole = whole.view(2, 2, -1)[:, 1] if collective.in_parts else whole
    found = expected(collective, "float32", size, 2, rank=1)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, whole.amax(0))
    else:
        mean = whole.double().mean(0) if name.endswith("avg") else whole.double().sum(0)
        assert np.allclose(found.value, mean.numpy(), rtol=1e-15)
        assert (found.allowed > 0).all()


@pytest.mark.parametrize("world", [2, 3, 64])
def test_no_tensor_exceeds_the_largest(world: int) -> None:
    largest = SIZES[Level.THOROUGH][-1]
    for collective in EVERY_COLLECTIVE:
        for dtype in collective.dtypes:
            size = collective.size(largest, dtype, world)
            gave = size * world if collective.in_parts else size
            got = gave * world if collective.gathers else gave
            assert max(gave, got) * getattr(torch, dtype).itemsize <= LARGEST_BYTES
    assert BY_NAME["all_reduce.sum"].size(largest, "float32", world) == largest


@drawn(world=st.integers(2, 40))
def test_every_rank_is_in_a_group_of_each_size(world: int) -> None:
    groups = groups_of(world)
    for size in {2, 3} & set(range(world)):
        members = [rank for group in groups if len(group) == size for rank in group]
        assert set(members) == set(range(world))
        assert len(members) < world + size, "no more groups than it takes"
    assert all(group == tuple(range(group[0], group[-1] + 1)) for group in groups)
    assert len(set(groups)) == len(groups)
    assert groups_of(2) == ()
