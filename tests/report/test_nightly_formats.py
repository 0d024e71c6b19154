"""Annotations of GitHub Actions and JUnit XML, from comparisons made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from consistency.capture.records import StageMemory
from consistency.comparison.result import Comparison, Finding, Outcome, TensorComparison, WorkerSummary
from consistency.report import github
from consistency.report.formats import View
from consistency.report.junit import as_junit, render

HOSTILE = "layer\n::error::gotcha\r%0A\x1b[31m<&\"'>"


def worker(name: str, **fields: Any) -> WorkerSummary:
    return WorkerSummary(
        **{"name": name, "load_path": "isolated", "architecture": "x86-64", "model": "chip", "uuid": None,
           "status": "ok",
           "reason": None, "environment": {}, **fields}
    )  # fmt: skip


def tensor(stage: str, **statuses: Any) -> TensorComparison:
    rows = tuple(Outcome(workers=(name,), reference="file", status=status) for name, status in statuses.items())
    return TensorComparison(
        stage=stage, load_path="isolated", layer=HOSTILE, tensor="weight", shape=(1,), dtype="float32", rule="bitwise",
        classes=(tuple(statuses),), outcomes=rows,
    )  # fmt: skip


def comparison(*findings: Finding, verdict: Any = "inconsistent", **fields: Any) -> Comparison:
    return Comparison(
        **{
            "case": "llama", "dtype": "float32", "level": "standard", "load_paths": ("isolated",), "verdict": verdict,
            "reference": "a", "workers": (worker("a"), worker("b")), "architectures": (), "findings": findings,
            "tensors": (tensor("base", a="equal", b="equal"), tensor("adapter", a="equal", b="outside")), **fields,
        }
    )  # fmt: skip


ZEROS = Finding(
    kind="zeros", severity="error", message=f"adapter · b · {HOSTILE}", workers=("b",), tensors=("adapter::x.y",)
)
LOST = Finding(kind="lost-worker", severity="error", message="b was lost", workers=("b",))
SETTING = Finding(kind="inputs", severity="error", message="other inputs", workers=("b",))


def commands(found: Comparison) -> list[str]:
    """Return the commands that a runner obeys: those outside of what stops it, after leading blanks."""
    obeyed, stopped = [], ""
    for line in b"".join(github.render(found, View())).decode().split("\n"):
        if stopped:
            stopped = "" if line.strip() == f"::{stopped}::" else stopped
        elif line.startswith("::stop-commands::"):
            stopped = line.removeprefix("::stop-commands::")
        elif line.strip().startswith("::"):
            obeyed.append(line)
    assert not stopped
    return obeyed


def test_each_finding_is_one_line_that_no_name_can_end() -> None:
    note = Finding(kind="skipped", severity="note", message="m")
    warning = Finding(kind="setting: a,b", severity="warning", message="m")
    lines = commands(comparison(ZEROS, warning, note))
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::notice"]
    assert all("\n" not in line and "\r" not in line and "\x1b" not in line for line in lines)
    assert lines[1].startswith("::warning title=consistency%3A setting%3A a%2Cb::")


def test_no_more_annotations_than_are_shown() -> None:
    assert len(commands(comparison(*[ZEROS] * 50))) == 10


def test_incomplete_run_without_a_finding_is_an_annotation_too() -> None:
    assert commands(comparison(verdict="incomplete")) == ["::error title=consistency::incomplete"]
    assert commands(comparison(verdict="consistent")) == []


def test_summary_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    commands(comparison(ZEROS))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    commands(comparison(ZEROS))
    assert "llama" in (tmp_path / "summary.md").read_text()


def cases(suite: ElementTree.Element) -> dict[tuple[str | None, str | None], list[str]]:
    return {(c.get("classname"), c.get("name")): [child.tag for child in c] for c in suite.iter("testcase")}


def test_a_case_per_stage_and_worker(tmp_path: Path) -> None:
    (tmp_path / "out.xml").write_bytes(b"".join(render(comparison(ZEROS), View(elapsed_s=1.5))))
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert cases(suite) == {
        ("llama.base", "a"): [],
        ("llama.base", "b"): [],
        ("llama.adapter", "a"): [],
        ("llama.adapter", "b"): ["failure"],
    }
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "0")
    failure = suite.find(".//failure")
    assert failure is not None
    assert "gotcha" in str(failure.get("message"))
    assert failure.get("type") == "zeros"


def test_finding_without_a_bad_row_fails_its_stage() -> None:
    """Drift: every row is inside its bound, and the bits are not those of the night before."""
    drift = Finding(kind="drift", severity="error", message="m", workers=("a",), tensors=("base::x.y",))
    assert cases(as_junit(comparison(drift)))["llama.base", "a"] == ["failure"]


def test_lost_worker_is_an_error_and_other_findings_fail() -> None:
    lost = worker("b", status="lost", reason="killed by SIGKILL", stack="frame")
    blocked = (tensor("merged", a="within", b="blocked"),)
    suite = as_junit(comparison(LOST, SETTING, verdict="incomplete", workers=(worker("a"), lost), tensors=blocked))
    found = cases(suite)
    assert found["llama", "b"] == ["error"]
    assert found["llama.merged", "b"] == ["error"]
    assert found["llama", "inputs"] == ["failure"]
    assert (suite.get("errors"), suite.get("failures")) == ("2", "1")


def test_stage_that_could_not_be_judged_is_skipped() -> None:
    suite = as_junit(comparison(verdict="consistent", tensors=(tensor("forward", a="skipped", b="within"),)))
    assert cases(suite) == {("llama.forward", "a"): ["skipped"], ("llama.forward", "b"): []}


def test_simulated_devices_are_told() -> None:
    suite = as_junit(comparison(simulated=True))
    assert suite.find("properties/property[@name='simulated']") is not None


def test_what_a_baseline_accepts_fails_nothing() -> None:
    """Its rows are as bad as before; the finding is a note."""
    accepted = Finding(
        kind="zeros", severity="note", message="accepted on a day", workers=("b",), tensors=("adapter::x.y",),
        accepted="error",
    )  # fmt: skip
    suite = as_junit(comparison(accepted, verdict="consistent"))
    assert cases(suite)["llama.adapter", "b"] == []
    assert suite.get("failures") == "0"


def test_names_are_the_same_whatever_the_level() -> None:
    quick, standard = (comparison(load_paths=paths) for paths in (("isolated",), ("isolated", "isolated+low-memory")))
    assert cases(as_junit(quick)).keys() == cases(as_junit(standard)).keys()
    other = msgspec.structs.replace(tensor("adapter", a="equal"), load_path="shared")
    assert ("llama.adapter", "a (shared)") in cases(as_junit(comparison(tensors=(other,))))


def test_a_test_case_has_the_time_of_its_stage() -> None:
    memory = (StageMemory(stage="base", host_resident_bytes=1, host_peak_bytes=1, elapsed_s=2.5),)
    suite = as_junit(comparison(workers=(worker("a", stage_memory=memory), worker("b"))))
    times = {(c.get("classname"), c.get("name")): c.get("time") for c in suite.iter("testcase")}
    assert times["llama.base", "a"] == "2.500"
    assert times["llama.base", "b"] is None, "it is not known"


def test_skipped_checks_are_skipped_and_say_why() -> None:
    why = [
        Finding(kind="skipped", severity="note", message=f"{stage} · skipped on a: {reason}", workers=("a",),
                tensors=(f"{stage}::x.y",))
        for stage, reason in (("memory", "one"), ("memory", "two"), ("forward", "three"))
    ]  # fmt: skip
    tensors = (tensor("memory", a="skipped", b="equal"), tensor("memory", a="equal"), tensor("forward", a="skipped"))
    suite = as_junit(comparison(*why, verdict="consistent", tensors=tensors))
    assert cases(suite) == {
        ("llama.memory", "a"): [],
        ("llama.memory", "b"): [],
        ("llama.forward", "a"): ["skipped"],
        ("llama.memory", "a: skipped checks"): ["skipped"],
    }
    assert [one.get("message") for one in suite.iter("skipped")] == [
        "forward · skipped on a: three", "memory · skipped on a: one; memory · skipped on a: two"
    ]  # fmt: skip
    assert suite.get("skipped") == "2"
