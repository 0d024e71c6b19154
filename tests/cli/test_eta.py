"""How far a run is: by stage, by case, and in time."""

from __future__ import annotations

import pytest

from consistency.cli.progress import Eta, format_eta
from consistency.worker.protocol import Event, EventKind

STAGES = [("start", 0.1), ("load base", 0.1), ("base", 0.2), ("merged", 0.6)]


def event(kind: EventKind, stage: str = "", **fields: object) -> Event:
    return Event(at=0.0, kind=kind, stage=stage, **fields)  # type: ignore[arg-type]  # by name


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_is_in_one_of_its_stages() -> None:
    outlook = Eta({"a": {"cpu": STAGES}})
    outlook.take("cpu", event("stage", "import libraries"))
    assert outlook.place("cpu") == (1, 4)
    outlook.take("cpu", event("stage", "base"))
    assert outlook.place("cpu") == (3, 4)
    assert outlook.share == pytest.approx(0.2)
    outlook.take("cpu", event("step", "base", done=1, total=2))
    assert outlook.share == pytest.approx(0.3)
    outlook.take("cpu", event("stage", "something that no plan knows"))
    assert outlook.place("cpu") == (3, 4), "it goes on from where it was"
    outlook.take("cpu", event("done"))
    assert (outlook.share, outlook.place("cpu")) == (1.0, None)


def test_a_block_is_a_part_of_its_step() -> None:
    outlook = Eta({"a": {"cpu": STAGES}})
    outlook.take("cpu", event("stage", "merged"))
    outlook.take("cpu", event("step", "merged", done=0, total=1, block=3, blocks=4, share=0.5))
    assert outlook.share == pytest.approx(0.4 + 0.6 / 2)


def test_the_share_never_goes_back() -> None:
    outlook = Eta({"a": {"cpu": STAGES}})
    outlook.take("cpu", event("stage", "base"))
    outlook.take("cpu", event("step", "base", done=3, total=4))
    assert outlook.share == pytest.approx(0.35)
    outlook.take("cpu", event("step", "base", done=0, total=9))
    outlook.take("cpu", event("stage", "base, after the adapter"))
    assert outlook.share == pytest.approx(0.35)
    outlook.take("cpu", event("stage", "merged"))
    assert outlook.share == pytest.approx(0.4)


def test_the_share_is_of_all_workers_also_of_those_that_have_not_begun() -> None:
    outlook = Eta({"a": {"cpu": STAGES, "cuda:0": STAGES}})
    outlook.take("cpu", event("done"))
    assert outlook.share == 0.5
    outlook.take("cuda:0", event("failed"))
    assert outlook.share == 1.0


def test_of_several_cases_each_worker_has_its_own_place() -> None:
    outlook = Eta({"a": {"cpu": STAGES}, "b": {"cpu": STAGES[1:]}})
    outlook.take("cpu", event("case", message="a", done=0, total=2))
    outlook.take("cpu", event("stage", "merged"))
    assert outlook.share == pytest.approx(0.2)
    outlook.take("cpu", event("done"))
    assert outlook.share == pytest.approx(0.5)
    outlook.take("cpu", event("case", message="b", done=1, total=2))
    assert outlook.place("cpu") == (1, 3)
    outlook.take("cpu", event("done"))
    assert outlook.share == 1.0


def test_rounds_of_a_drill_count_where_no_stages_are_known() -> None:
    outlook = Eta()
    assert outlook.share is None
    outlook.take("cpu", event("stage", "base"))
    assert (outlook.share, outlook.place("cpu"), outlook.left_s) == (None, None, None)
    outlook.take("", event("case", message="bit-flip", done=3, total=12))
    assert outlook.share == 0.25


def test_the_rest_takes_as_long_for_each_share_as_what_is_done() -> None:
    clock = Clock()
    outlook = Eta({"a": {"cpu": STAGES, "cuda:0": STAGES}}, clock)
    outlook.take("cpu", event("stage", "merged"))
    assert outlook.left_s is None, "too early"
    clock.now = 20.0
    assert outlook.left_s == pytest.approx(20 * 0.8 / 0.2), "a worker that waits for its turn is part of the rest"
    for label in ("cpu", "cuda:0"):
        outlook.take(label, event("done"))
    assert outlook.left_s == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1, "less than 10 s left"),
        (9.9, "less than 10 s left"),
        (10, "about 10 s left"),
        (33, "about 35 s left"),
        (100, "about 2 min left"),
        (4300, "about 1 h 10 min left"),
    ],
)
def test_a_guess_is_as_coarse_as_it_is(seconds: float, text: str) -> None:
    assert format_eta(seconds) == text
