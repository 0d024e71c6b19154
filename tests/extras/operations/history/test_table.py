"""A history as a table: nights, classes of bits, verdicts and trends."""

from __future__ import annotations

import itertools
import math

import pytest

from consistency.extras.operations.history.page import Line, Trend, lines, nights, trend
from consistency.extras.operations.history.records import RunRecord
from tests.extras.operations.history.made_histories import month, run, worker


def table(*runs: RunRecord) -> list[Line]:
    return lines(nights(reversed(runs), 0))


def letters(line: Line) -> str:
    return "".join("." if cell is None else cell.letter for cell in line.cells)


def test_runs_of_two_hosts_share_a_night_and_the_last_ones_are_kept() -> None:
    found = nights(reversed(month()), 7)
    assert [night.began[:10] for night in found] == [f"2026-11-{day}" for day in range(24, 31)]
    assert all([one.host for one in night.runs] == ["node-1", "node-2"] for night in found)
    assert len(nights(reversed(month()), 0)) == 30


def test_a_second_run_of_a_host_and_one_after_twelve_hours_are_nights_of_their_own() -> None:
    again = [run(0), run(0.1), run(0.2, host="node-2")]
    assert [len(night.runs) for night in nights(reversed(again), 0)] == [1, 2]
    late = [run(0), run(0.6, host="node-2")]
    assert [len(night.runs) for night in nights(reversed(late), 0)] == [1, 1]
    two_cases = [run(0), run(0.1, case="other")]
    assert [len(night.runs) for night in nights(reversed(two_cases), 0)] == [2]


def test_a_night_is_as_bad_as_its_worst_run() -> None:
    lost = worker("cuda:0", "node-2", verdict="incomplete", status="lost")
    (night,) = nights([run(0, lost, host="node-2"), run(0, worker("cuda:0"))], 0)
    assert (night.verdict, night.worst.host) == ("incomplete", "node-2")


def test_equal_letters_are_equal_bits() -> None:
    (line,) = table(*(run(n, worker("cuda:0", bits={"merged": bits})) for n, bits in enumerate("xxyxz")))
    assert letters(line) == "AABAC"


def test_a_stage_that_was_left_out_is_no_other_result() -> None:
    found = [{"base": "b", "merged": "m"}, {"base": "b"}, {"merged": "m"}, {"merged": "n"}]
    (line,) = table(*(run(n, worker("cuda:0", bits=bits)) for n, bits in enumerate(found)))
    assert letters(line) == "AAAB"


def test_a_run_without_results_has_no_letter() -> None:
    (line,) = table(run(0, worker("cuda:0")), run(1, worker("cuda:0", bits={}, status="lost", verdict="incomplete")))
    assert letters(line) == "A–"
    assert "bits" not in str(line.cells[1] and line.cells[1].description)


def test_other_software_and_other_inputs_are_marked_once() -> None:
    made = [("s", "i"), ("s", "i"), ("t", "i"), ("t", "j"), ("t", "j")]
    (line,) = table(*(run(n, worker("cuda:0", software=s, inputs=i)) for n, (s, i) in enumerate(made)))
    assert [cell.change for cell in line.cells if cell] == ["", "", "other software", "other inputs", ""]
    assert letters(line) == "AAABB", "results of other inputs are never called equal"


def test_a_device_has_one_row_for_all_load_paths_cases_and_numbers() -> None:
    first = run(0, worker("cuda:0", device="GPU-a", ratio=0.1), worker("cuda:0", device="GPU-a", load_path="shared",
                verdict="inconsistent", ratio=0.7))  # fmt: skip
    second = run(1, worker("cuda:3", device="GPU-a", case="one"), worker("cuda:3", device="GPU-a", case="two"))
    (line,) = table(first, second)
    assert [(cell.verdict, cell.ratio) for cell in line.cells if cell] == [("inconsistent", 0.7), ("consistent", 0.5)]
    assert (line.device, line.latest.name) == ("GPU-a", "cuda:3")


def test_worse_devices_come_first() -> None:
    bad = worker("cuda:2", verdict="inconsistent", drift=("merged",))
    lost = worker("cuda:1", verdict="incomplete", status="lost")
    assert [line.latest.name for line in table(run(0, worker("cpu"), lost, bad))] == ["cuda:1", "cuda:2", "cpu"]
    assert next(iter(table(run(0, bad, worker("cpu")), run(1, worker("cpu"))))).latest.name == "cuda:2"


def test_a_device_and_a_case_can_be_chosen() -> None:
    found = nights([run(0, worker("cuda:0", case="a"), worker("cuda:1", case="a"), worker("cuda:1", case="b"))], 0)
    assert [line.latest.name for line in lines(found, "cuda:1")] == ["cuda:1"]
    assert [line.latest.name for line in lines(found, "GPU-node-1-cuda:0")] == ["cuda:0"]
    assert [line.latest.name for line in lines(found, None, "b")] == ["cuda:1"]
    assert lines(found, "cuda:0", "b") == []


def test_more_classes_than_letters() -> None:
    (line,) = table(*(run(n, worker("cuda:0", bits={"merged": str(n)})) for n in range(28)))
    assert letters(line).endswith("ZAAAB")


def heights(found: Trend) -> list[float]:
    return [float(point.partition(",")[2]) for line in found.lines for point in line.split(" ")]


def test_a_trend_is_drawn_from_zero_to_its_largest() -> None:
    found = trend([0.0, 0.25, 0.5])
    assert heights(found) == [24.0, 14.0, 4.0]
    assert (found.limit, found.last, found.largest, found.width) == (None, 0.5, 0.5, 30.0)
    assert trend([0.5, 2.0]).limit == 14.0
    assert heights(trend([0.0, 0.0])) == [24.0, 24.0]


def test_a_night_without_a_number_is_a_gap() -> None:
    found = trend([0.1, 0.2, None, 0.3])
    assert [line.count(",") for line in found.lines] == [2]
    assert [x for x, _ in found.dots] == [15.0, 35.0]
    assert found.beyond == ()
    empty = trend([None, None])
    assert (empty.lines, empty.dots, empty.last, empty.limit) == ((), (), None, None)


@pytest.mark.parametrize("huge", [math.nan, math.inf, 1e30, 2.1])
def test_what_is_beyond_the_drawing_does_not_flatten_the_rest(huge: float) -> None:
    found = trend([0.5, 0.6, huge, 0.5])
    assert found.beyond == (25.0,)
    assert found.limit == 14.0
    assert all(b - a > 0.5 for a, b in itertools.pairwise(sorted(set(heights(found)))))
    assert found.largest == huge or math.isnan(found.largest or 0)


def test_what_a_lost_worker_left_is_neither_other_bits_nor_other_inputs() -> None:
    """It ends in the middle of a stage, and what it had recorded was drawn as a change of software and inputs."""
    part = {"merged": "half"}
    lost = worker("cuda:0", bits=part, inputs="fewer", software="?", status="lost", verdict="incomplete")
    (line,) = table(run(0, worker("cuda:0")), run(1, lost), run(2, worker("cuda:0")))
    assert letters(line) == "A–A"
    assert [cell.change for cell in line.cells if cell] == ["", "", ""]
