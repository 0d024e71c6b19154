"""Annotations of GitHub Actions and JUnit XML, of a run and of a suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from consistency.capture.records import StageMemory
from consistency.comparison.result import Comparison, Finding, TensorComparison
from consistency.comparison.suite import SuiteResult
from consistency.report import github, junit
from consistency.report.formats import View
from consistency.report.junit import as_junit
from tests.report.made_comparisons import ALL, comparison, hostile, tensor, worker
from tests.report.made_suites import case, good, lost, many, suite, unusable, zeros

HOSTILE = "layer\n::error::gotcha\r%0A\x1b[31m<&\"'>"
ZEROS = Finding(
    kind="zeros", severity="error", message=f"adapter · b · {HOSTILE}", workers=("b",), tensors=("adapter::x.y",)
)


def rows(stage: str, **statuses: Any) -> TensorComparison:
    return tensor([[*statuses]], stage=stage, layer=HOSTILE, statuses=statuses)


def ran(*findings: Finding, **fields: Any) -> Comparison:
    """Return a run of two workers, of which b is wrong in its adapter."""
    tensors = (rows("base", a="equal", b="equal"), rows("adapter", a="equal", b="outside"))
    given = {"verdict": "inconsistent", "workers": (worker("a"), worker("b")), "tensors": tensors, **fields}
    return comparison([*given.pop("tensors")], findings=findings, **given)


# --- GitHub ---------------------------------------------------------------------------------------------------------


def commands(found: Comparison | SuiteResult, folder: str | None = None) -> list[str]:
    """Return the commands that a runner obeys: those outside of what stops it, after leading blanks."""
    obeyed, stopped = [], ""
    for line in b"".join(github.render(found, View(folder=folder))).decode().split("\n"):
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
    lines = commands(ran(ZEROS, warning, note))
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::notice"]
    assert all("\n" not in line and "\r" not in line and "\x1b" not in line for line in lines)
    assert lines[1].startswith("::warning title=consistency%3A setting%3A a%2Cb::")
    assert len(commands(ran(*[ZEROS] * 50))) == 10, "no more than are shown"
    of_suite = commands(suite(case("a\n::error::gotcha", hostile())))
    assert [line.partition(" title=")[0] for line in of_suite] == ["::error", "::notice"]


def test_incomplete_run_without_a_finding_is_an_annotation_too() -> None:
    assert commands(ran(verdict="incomplete")) == ["::error title=consistency::incomplete"]
    assert commands(ran(verdict="consistent")) == []


def test_summary_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    commands(ran(ZEROS))
    for name, made, text in (("run", ran(ZEROS), "llama"), ("suite", many(), "**INCOMPLETE**")):
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / name))
        commands(made)
        assert text in (tmp_path / name).read_text()


def test_one_annotation_per_cause_of_a_suite() -> None:
    found = commands(many(), "run")
    assert [line.split("::")[1].split(" ")[0] for line in found] == ["error"] * 4 + ["notice"]
    assert found[0].startswith("::error title=consistency%3A zeros::56 of 100 cases · adapter · cuda:1 · zeros")
    assert "consistency reproduce run/cases/lora-000" in found[0]


# --- JUnit ----------------------------------------------------------------------------------------------------------


def cases(root: ElementTree.Element) -> dict[tuple[str | None, str | None], list[str]]:
    return {(c.get("classname"), c.get("name")): [child.tag for child in c] for c in root.iter("testcase")}


ACCEPTED = msgspec.structs.replace(ZEROS, severity="note", message="accepted on a day", accepted="error")
DRIFT = Finding(kind="drift", severity="error", message="m", workers=("a",), tensors=("base::x.y",))
LOST = {
    "verdict": "incomplete", "tensors": (rows("merged", a="within", b="blocked"),),
    "workers": (worker("a"), worker("b", status="lost", reason="killed by SIGKILL", stack="frame")),
}  # fmt: skip
LOST_AND_SETTING = (
    Finding(kind="lost-worker", severity="error", message="b was lost", workers=("b",)),
    Finding(kind="inputs", severity="error", message="other inputs", workers=("b",)),
)


@pytest.mark.parametrize(
    ("found", "expected", "counts"),
    [
        (
            ran(ZEROS),
            {("llama.base", "a"): [], ("llama.base", "b"): [], ("llama.adapter", "a"): [],
             ("llama.adapter", "b"): ["failure"]},
            ("4", "1", "0"),
        ),
        # every row is inside its bound, and the bits are not those of the night before
        (ran(DRIFT), {("llama.base", "a"): ["failure"]}, ("4", "1", "0")),
        (
            ran(*LOST_AND_SETTING, **LOST),
            {("llama", "b"): ["error"], ("llama.merged", "b"): ["error"], ("llama", "inputs"): ["failure"]},
            ("4", "1", "2"),
        ),
        (
            ran(verdict="consistent", tensors=(rows("forward", a="skipped", b="within"),)),
            {("llama.forward", "a"): ["skipped"], ("llama.forward", "b"): []},
            ("2", "0", "0"),
        ),
        (ran(ACCEPTED, verdict="consistent"), {("llama.adapter", "b"): []}, ("4", "0", "0")),
    ],
    ids=["zeros", "a finding without a bad row", "lost", "skipped", "accepted, with rows as bad as before"],
)  # fmt: skip
def test_a_case_per_stage_and_worker(
    found: Comparison, expected: dict[Any, list[str]], counts: tuple[str, ...]
) -> None:
    root = ElementTree.fromstring(b"".join(junit.render(found, View(elapsed_s=1.5))))
    assert {name: cases(root).get(name) for name in expected} == expected
    assert tuple(root.get(name) for name in ("tests", "failures", "errors")) == counts
    assert len(cases(root)) == int(counts[0])


def test_a_failure_has_its_kind_and_message() -> None:
    failure = as_junit(ran(ZEROS)).find(".//failure")
    assert failure is not None
    assert "gotcha" in str(failure.get("message"))
    assert failure.get("type") == "zeros"


def test_simulated_devices_are_told() -> None:
    assert as_junit(ran(simulated=True)).find("properties/property[@name='simulated']") is not None


def test_names_are_the_same_whatever_the_level() -> None:
    quick, standard = (ran(load_paths=paths) for paths in (("isolated",), ("isolated", "isolated+low-memory")))
    assert cases(as_junit(quick)).keys() == cases(as_junit(standard)).keys()
    other = msgspec.structs.replace(rows("adapter", a="equal"), load_path="shared")
    assert ("llama.adapter", "a (shared)") in cases(as_junit(ran(tensors=(other,))))


def test_a_test_case_has_the_time_of_its_stage() -> None:
    memory = (StageMemory(stage="base", host_resident_bytes=1, host_peak_bytes=1, elapsed_s=2.5),)
    root = as_junit(ran(workers=(worker("a", stage_memory=memory), worker("b"))))
    times = {(c.get("classname"), c.get("name")): c.get("time") for c in root.iter("testcase")}
    assert times["llama.base", "a"] == "2.500"
    assert times["llama.base", "b"] is None, "it is not known"


def test_skipped_checks_are_skipped_and_say_why() -> None:
    why = [
        Finding(kind="skipped", severity="note", message=f"{stage} · skipped on a: {reason}", workers=("a",),
                tensors=(f"{stage}::x.y",))
        for stage, reason in (("memory", "one"), ("memory", "two"), ("forward", "three"))
    ]  # fmt: skip
    tensors = (rows("memory", a="skipped", b="equal"), rows("memory", a="equal"), rows("forward", a="skipped"))
    root = as_junit(ran(*why, verdict="consistent", tensors=tensors))
    assert cases(root) == {
        ("llama.memory", "a"): [],
        ("llama.memory", "b"): [],
        ("llama.forward", "a"): ["skipped"],
        ("llama.memory", "a: skipped checks"): ["skipped"],
    }
    assert [one.get("message") for one in root.iter("skipped")] == [
        "forward · skipped on a: three", "memory · skipped on a: one; memory · skipped on a: two"
    ]  # fmt: skip
    assert root.get("skipped") == "2"


def test_a_test_suite_per_case() -> None:
    made = comparison(
        [
            tensor([ALL], stage="forward", statuses=dict.fromkeys(ALL, "skipped")),
            tensor([ALL], stage="merged", statuses={"cuda:1": "blocked"}),
            tensor([ALL], stage="base", statuses={"cuda:1": "skipped"}, layer="a"),
            tensor([ALL], stage="base", layer="b"),
        ]
    )
    found = suite(
        case("alice", good()), case("bob", zeros(2)), case("killer", lost()), unusable("gone"), case("x", made),
        case("\x00\x1b", hostile()),
    )  # fmt: skip
    root = ElementTree.fromstring(b"".join(junit.render(found, View())))
    assert [(s.get("name"), s.get("tests"), s.get("failures"), s.get("errors")) for s in root][:4] == [
        ("consistency alice", "8", "0", "0"),
        ("consistency bob", "4", "1", "0"),
        ("consistency killer", "4", "0", "1"),
        ("consistency gone", "1", "0", "1"),
    ]
    assert root.tag == "testsuites"
    for name in ("tests", "failures", "errors"):
        assert root.get(name) == str(sum(int(one.get(name, "0")) for one in root)), name
    of_cases = cases(root)
    assert of_cases["bob.adapter", "cuda:1"] == ["failure"]
    assert of_cases["bob.adapter", "cuda:0"] == []
    assert of_cases["killer", "cuda:1"] == ["error"]
    assert of_cases["gone", "input"] == ["error"]
    assert of_cases["x.forward", "cpu"] == ["skipped"]
    assert of_cases["x.merged", "cuda:1"] == ["error"]
    assert of_cases["x.merged", "cpu"] == []
    assert of_cases["x.base", "cuda:1"] == [], "another tensor of the stage was compared"
