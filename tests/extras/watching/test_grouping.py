"""What one fault does is one finding, and two faults are two."""

from __future__ import annotations

from consistency.extras.watching.grouping import one_for_each_fault
from consistency.extras.watching.outcome import Discovery


def discovery(kind: str, ranks: tuple[int, ...], layer: str = "model.layers.1") -> Discovery:
    return Discovery(kind=kind, message=f"{kind} of {ranks}", ranks=ranks, tensors=((layer, "output"),), next="")


def summary(discoveries: list[Discovery]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(found.kind, found.ranks, len(found.detail)) for found in one_for_each_fault(discoveries)]


def test_ranks_that_compute_otherwise_stand_under_the_block_that_is_wrong() -> None:
    found = [discovery("other-rank-differs", (0, 1)), discovery("other-rank-differs", (1, 2))]
    assert summary([*found, discovery("wrong-block", (1,))]) == [("wrong-block", (1,), 2)]


def test_of_two_pairs_the_rank_in_both_is_named() -> None:
    found = [discovery("other-rank-differs", (0, 1)), discovery("other-rank-differs", (1, 2))]
    assert summary(found) == [("other-rank-differs", (1,), 1)]


def test_both_ways_between_two_ranks_are_one_finding() -> None:
    found = [discovery("other-rank-differs", (0, 1)), discovery("other-rank-differs", (1, 0))]
    assert summary(found) == [("other-rank-differs", (0, 1), 1)]


def test_a_finding_of_other_ranks_stands_by_itself() -> None:
    found = [discovery("wrong-block", (3,)), discovery("other-rank-differs", (0, 1))]
    assert summary(found) == [("wrong-block", (3,), 0), ("other-rank-differs", (0, 1), 0)]


def test_a_block_that_is_wrong_on_all_ranks_is_one_finding() -> None:
    found = [discovery("wrong-block", (rank,)) for rank in range(3)]
    assert summary(found) == [("wrong-block", (0, 1, 2), 2)]
    assert len(summary([*found, discovery("wrong-block", (1,), "model.layers.2")])) == 2


def test_gradients_that_differ_stand_under_the_sum_that_is_wrong() -> None:
    found = [discovery("ranks-differ", (0, 1, 2)), discovery("wrong-sum", (1,))]
    assert summary(found) == [("wrong-sum", (1,), 1)]


def test_set_up_and_a_card_are_two_findings() -> None:
    found = [discovery("same-batch", (0, 1)), discovery("wrong-block", (1,))]
    assert len(summary(found)) == 2
