"""What a comparison says of each worker."""

from __future__ import annotations

import math

import pytest

from consistency.comparison.by_worker import verdicts, worse
from consistency.comparison.result import Finding
from tests.report.made_comparisons import comparison, faulty, worker


def test_an_error_counts_against_the_workers_that_it_names() -> None:
    assert verdicts(faulty().workers, faulty().findings) == {
        "cpu": "consistent", "cuda:0": "consistent", "cuda:1": "inconsistent", "cuda:2": "consistent",
    }  # fmt: skip
    warning = Finding(kind="memory", severity="warning", message="m", workers=("cuda:1",))
    warned = comparison([], findings=(warning,))
    assert set(verdicts(warned.workers, warned.findings).values()) == {"consistent"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_worker_that_was_lost_on_any_load_path_is_incomplete(order: tuple[int, int]) -> None:
    both = [worker("cuda:0"), worker("cuda:0", load_path="shared", status="lost", reason="killed")]
    found = comparison([], verdict="incomplete", workers=tuple(both[i] for i in order))
    assert verdicts(found.workers, found.findings) == {"cuda:0": "incomplete"}


def test_not_a_number_is_worse_than_any_number() -> None:
    assert math.isnan(worse(math.nan, 3.0))
    assert math.isnan(worse(math.inf, math.nan))
    assert worse(2.0, None) == worse(2.0, 1.0) == 2.0
