"""A rank whose loss leaves those of the others is named; one whose data were always harder is not."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any

import pytest
import torch

from consistency.extras.watching.loss_by_rank import LossByRank, chance_of_as_many
from consistency.extras.watching.outcome import Discovery
from tests.extras.watching.trainings import Training, batch, on_ranks


class Gathered:
    """The talk of a first rank, to which the others give what a test says."""

    rank = 0

    def __init__(self, others: list[list[float]]) -> None:
        self.others = others
        self.world = len(others) + 1

    def gather(self, value: Any) -> list[Any]:
        return [value, *((losses, None) for losses in self.others)]


def found_after(intervals: list[list[list[float]]]) -> list[Discovery]:
    """Check several intervals, each with the losses of every rank; return all that was found."""
    found: list[Discovery] = []
    watched = LossByRank()
    for own, *others in intervals:
        for loss in own:
            watched.note(torch.tensor(loss))
        talk: Any = Gathered(others)
        found += watched.check(None, talk, "between two steps").discoveries
    return found


def drawn(generator: random.Random, means: list[float], steps: int = 50) -> list[list[float]]:
    return [[generator.gauss(mean, 0.1) for _ in range(steps)] for mean in means]


def test_the_chance_is_that_of_all_orders() -> None:
    before, now, marked = 4, 5, 3
    orders = list(itertools.combinations(range(before + now), marked))
    for least in range(marked + 1):
        as_many = [order for order in orders if sum(place >= before for place in order) >= least]
        assert chance_of_as_many(marked - least, before, least, now) == pytest.approx(
            float(Fraction(len(as_many), len(orders)))
        )


def test_a_rank_that_leaves_the_others_is_named() -> None:
    generator = random.Random(0)
    healthy, wrong = drawn(generator, [2.0, 2.0, 2.0]), drawn(generator, [1.9, 1.9, 3.0])
    (found,) = found_after([healthy, wrong])
    assert (found.kind, found.severity, found.ranks) == ("loss-leaves", "note", (2,))
    assert "above in 50 of 50 passes" in found.message


def test_of_two_ranks_none_is_named() -> None:
    generator = random.Random(1)
    (found,) = found_after([drawn(generator, [2.0, 2.0]), drawn(generator, [1.9, 3.0])])
    assert found.ranks == (0, 1)


def test_a_loss_that_is_not_a_number_is_above_all() -> None:
    generator = random.Random(2)
    wrong = drawn(generator, [1.9, 1.9, 1.9])
    wrong[1] = [float("nan")] * 50
    (found,) = found_after([drawn(generator, [2.0, 2.0, 2.0]), wrong])
    assert found.ranks == (1,)


def test_a_rank_with_harder_data_is_none() -> None:
    generator = random.Random(3)
    assert found_after([drawn(generator, [2.0, 2.0, 3.0]) for _ in range(5)]) == []


def test_healthy_losses_that_fall_are_none() -> None:
    generator = random.Random(4)
    for _ in range(200):
        assert found_after([drawn(generator, [mean] * 4) for mean in (4.0, 2.0, 1.0)]) == []


def text_that_is_damaged(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return a text that can be learned; from step 81 on, rank 1 gets one that cannot."""
    inputs = batch(step, rank)
    if rank != 1 or step <= 80:
        start = torch.randint(0, 8, (2, 1), generator=torch.Generator().manual_seed(10 * step + rank))
        ids = (start + torch.arange(12)) % 64
        inputs |= {"input_ids": ids, "labels": ids.clone()}
    return inputs


def train(rank: int, world: int) -> list[Any]:
    training = Training(rank=rank, world=world, steps=120, every=40, batches=text_that_is_damaged)
    return [[found.kind, list(found.ranks)] for found in training.run(None)]


@pytest.mark.slow
@pytest.mark.process
def test_a_shard_that_is_damaged_is_named_in_a_training() -> None:
    assert on_ranks(3, train) == [[["loss-leaves", [1]]]] * 3
