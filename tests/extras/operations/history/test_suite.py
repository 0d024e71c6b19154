"""A suite in a history: one entry for all cases, and drift judged case by case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.result import Comparison
from consistency.comparison.suite import SuiteResult
from consistency.errors import UsageError
from consistency.extras.operations.history.baseline import Baseline, accept, read_baseline
from consistency.extras.operations.history.drift import add_run
from consistency.extras.operations.history.records import RunWorkers
from consistency.extras.operations.history.store import History
from consistency.extras.operations.history.suite import SuiteEntry
from consistency.extras.operations.history.table import device_rows, print_runs, run_rows
from consistency.report.console import make_console
from consistency.report.summarize import summarize
from consistency.workflows.judging import compare_captures
from tests.conftest import MakeCapture
from tests.report.made_suites import unusable

Bits = dict[str, str]
"""Merged bits of each case on the one device."""


def records(bits: str, adapter: str) -> list[TensorRecord]:
    moved = TensorRecord(rule="bitwise",
        stage="adapter", layer="l", tensor="lora_A", status="equal", digest=adapter, reference="file",
        reference_digest=adapter, shape=(2,), dtype="float32",
    )  # fmt: skip
    weight = TensorRecord(stage="merged", layer="l", tensor="weight", rule="peer", status="measured", digest=bits)
    return [moved, weight]


@pytest.fixture
def history(tmp_path: Path) -> str:
    return str(tmp_path / "history")


Suite = Callable[..., dict[str, Comparison]]


@pytest.fixture
def night(make_capture: MakeCapture, history: str) -> Suite:
    """Run a suite; return the comparison of each case."""
    count = 0

    def once(
        bits: Bits, *, baseline: Baseline | None = None, stopped: bool = False, profile: str = "pinned"
    ) -> dict[str, Comparison]:
        nonlocal count
        entry, found, cases = SuiteEntry(History(history), baseline), {}, []
        for name, merged in bits.items():
            count += 1
            info = {"cuda:0": {"uuid": "GPU-a", "kernel_key": "torch 2"}}
            workers = {"cuda:0": records(merged, f"{name}-file")}
            folder = make_capture(f"{count}", workers, info=info, case={"profile": profile})
            captures = [read_capture(folder)]
            found[name] = entry.add(name, captures, compare_captures(captures))
            cases.append(summarize(name, f"cases/{name}", found[name], 1.0))
        if not stopped:
            entry.commit(SuiteResult(name="nightly", cases=tuple(cases), elapsed_s=3.0))
        return found

    return once


def drifted(found: dict[str, Comparison]) -> list[str]:
    return [name for name, one in found.items() if any(f.kind == "drift" for f in one.findings)]


def test_a_suite_is_one_entry_with_all_cases(night: Suite, history: str) -> None:
    night({"a": "m", "b": "n"})
    (run,) = History(history).runs()
    assert (run.case, run.verdict, run.cases) == ("nightly", "consistent", {"a": "consistent", "b": "consistent"})
    assert [(worker.case, worker.device) for worker in run.workers] == [("a", "GPU-a"), ("b", "GPU-a")]
    tables = [History(history).table(worker.table) for worker in run.workers]
    assert all(table is not None and set(table) == {"adapter::l.lora_A", "merged::l.weight"} for table in tables)
    (row,) = run_rows(History(history), 0)
    assert (row.devices, row.cases) == (1, {"a": "consistent", "b": "consistent"})


def test_drift_is_judged_case_by_case(night: Suite) -> None:
    night({"a": "m", "b": "n"})
    assert drifted(night({"a": "m", "b": "n"})) == []
    found = night({"a": "m", "b": "x"})
    assert drifted(found) == ["b"]
    assert found["b"].verdict == "inconsistent"
    assert "1 of 1 merged tensors" in found["b"].findings[0].message


def test_equal_inputs_under_another_name_are_another_case(
    make_capture: MakeCapture, history: str, night: Suite
) -> None:
    """Two cases may have the same files and different options."""
    night({"a": "m"})
    entry = SuiteEntry(History(history))
    info = {"cuda:0": {"uuid": "GPU-a", "kernel_key": "torch 2"}}
    captures = [read_capture(make_capture("other", {"cuda:0": records("x", "a-file")}, info=info))]
    assert entry.add("c", captures, compare_captures(captures)).verdict == "consistent"
    assert entry.add("a", captures, compare_captures(captures)).verdict == "inconsistent"


def test_a_case_is_compared_with_the_last_run_that_had_it(night: Suite) -> None:
    night({"a": "m", "b": "n"})
    night({"a": "m"})
    assert drifted(night({"a": "m", "b": "x"})) == ["b"]


def test_what_a_suite_computed_as_deployed_may_change(night: Suite) -> None:
    night({"a": "m"}, profile="deployed")
    found = night({"a": "x"}, profile="deployed")
    assert drifted(found) == ["a"]
    assert found["a"].verdict == "consistent"


def test_a_case_that_ran_alone_before_is_known(night: Suite, make_capture: MakeCapture, history: str) -> None:
    def alone(name: str, bits: str) -> Comparison:
        info = {"cuda:0": {"uuid": "GPU-a", "kernel_key": "torch 2"}}
        folder = make_capture(f"{name}-{bits}", {"cuda:0": records(bits, "a-file")}, info=info, case={"name": name})
        captures = [read_capture(folder)]
        return add_run(History(history), captures, compare_captures(captures), None)

    assert alone("a", "m").verdict == "consistent"
    assert drifted(night({"a": "x"})) == ["a"]
    assert alone("a", "y").verdict == "inconsistent"
    night({"d": "m"})
    assert alone("e", "m").verdict == "consistent", "no earlier run under this name has other bits"


def test_a_suite_that_is_stopped_leaves_no_entry(night: Suite, history: str) -> None:
    night({"a": "m", "b": "n"}, stopped=True)
    assert list(History(history).runs()) == []
    assert drifted(night({"a": "x", "b": "n"})) == []


def test_the_history_is_read_once_for_all_cases(night: Suite, history: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {f"case-{i}": "m" for i in range(10)}
    night(cases)
    night(cases)
    read: list[str] = []
    real = History.runs

    def runs(self: History, names: object = None) -> object:
        for run in real(self, names):  # type: ignore[arg-type]  # as it was called
            read.append(run.at)
            yield run

    monkeypatch.setattr(History, "runs", runs)
    night(cases)
    assert len(read) == 1


def test_accepted_drift_of_one_case_leaves_the_others_red(night: Suite, tmp_path: Path) -> None:
    night({"a": "m", "b": "n"})
    found = night({"a": "x", "b": "y"})
    path = tmp_path / "baseline.json"
    accept(path, found["a"].findings, found["a"].workers, reason="driver")
    again = night({"a": "x", "b": "y"}, baseline=read_baseline(path))
    assert (again["a"].verdict, again["b"].verdict) == ("consistent", "inconsistent")


def test_cases_that_could_not_be_checked_are_in_the_entry(history: str) -> None:
    suite = SuiteResult(name="nightly", cases=(unusable("gone"),), elapsed_s=0.1)
    SuiteEntry(History(history)).commit(suite)
    (run,) = History(history).runs()
    assert (run.verdict, run.cases, run.workers) == ("unchecked", {"gone": "unchecked"}, RunWorkers())
    assert run.findings == ("case gone · could not be checked: no such folder for the adapter",)


def test_rows_for_people(night: Suite, history: str, capsys: pytest.CaptureFixture[str]) -> None:
    night({"a": "m", "b": "m"})
    night({"a": "m", "b": "x"})
    rows = device_rows(History(history), "GPU-a", 0)
    assert [(row.case, row.bits["merged"], row.change) for row in rows] == [
        ("a", "A", ""), ("b", "B", "drift in merged"), ("a", "A", ""), ("b", "A", ""),
    ]  # fmt: skip
    assert [row.case for row in device_rows(History(history), "GPU-a", 0, "b")] == ["b", "b"]
    with pytest.raises(UsageError, match="no run has this case on the device"):
        device_rows(History(history), "GPU-a", 0, "z")
    print_runs(run_rows(History(history), 0), make_console())
    assert "nightly (2 cases)" in capsys.readouterr().out
