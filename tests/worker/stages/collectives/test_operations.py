"""What ranks have to get: the bound holds for any order of a sum and fails for anything else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from consistency.numerics.sums import Sum
from consistency.worker.stages.collectives.operations import COLLECTIVES, IN_PARTS, Collective, given

BY_NAME = {collective.name: collective for collective in COLLECTIVES}


def numbers(collective: Collective, dtype: str, size: int, world: int) -> list[torch.Tensor]:
    elements = size * world if collective.name in IN_PARTS else size
    return [given(collective.name, dtype, elements, rank) for rank in range(world)]


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
    expected = BY_NAME[name].expected(host, 0)
    assert isinstance(expected, Sum)
    assert within(total, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_term_left_out_or_added_twice_is_outside(dtype: str) -> None:
    host = numbers(BY_NAME["all_reduce.sum"], dtype, 64, 3)
    expected = BY_NAME["all_reduce.sum"].expected(host, 0)
    assert isinstance(expected, Sum)
    assert not within(host[0] + host[1], expected)
    assert not within(host[0] + host[1] + host[2] + host[2], expected)


def moved(name: str, host: list[torch.Tensor], rank: int) -> torch.Tensor:
    expected = BY_NAME[name].expected(host, rank)
    assert isinstance(expected, torch.Tensor)
    return expected


def test_whole_numbers_add_up_exactly() -> None:
    host = numbers(BY_NAME["all_reduce.sum"], "int32", 9, 3)
    assert torch.equal(moved("all_reduce.sum", host, 0), host[0] + host[1] + host[2])


def test_each_rank_gets_its_own_part() -> None:
    host = numbers(BY_NAME["all_to_all"], "float32", 2, 3)
    for rank in range(3):
        assert torch.equal(moved("all_to_all", host, rank), torch.cat([one[2 * rank : 2 * rank + 2] for one in host]))
    assert torch.equal(moved("send-receive", host, 0), host[2])
    assert torch.equal(moved("broadcast", host, 0), host[2])


def test_ranks_give_different_numbers_and_the_same_ones_every_time() -> None:
    assert not torch.equal(given("x", "float32", 8, 0), given("x", "float32", 8, 1))
    assert torch.equal(given("x", "float32", 8, 0), given("x", "float32", 8, 0))
