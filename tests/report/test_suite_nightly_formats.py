"""Annotations of GitHub Actions and JUnit XML of a suite."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from consistency.report import github, junit
from consistency.report.formats import View
from tests.report.made_comparisons import ALL, comparison, hostile, tensor
from tests.report.made_suites import case, good, lost, many, suite, unusable, zeros


def commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("::error", "::warning", "::notice"))]


def test_one_annotation_per_cause_and_the_suite_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    text = b"".join(github.render(many(), View(folder="run"))).decode()
    found = commands(text)
    assert [line.split("::")[1].split(" ")[0] for line in found] == ["error"] * 4 + ["notice"]
    assert found[0].startswith("::error title=consistency%3A zeros::56 of 100 cases · adapter · cuda:1 · zeros")
    assert "consistency reproduce run/cases/lora-000" in found[0]
    assert (tmp_path / "summary.md").read_text().startswith("**INCOMPLETE**")


def test_hostile_names_are_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    text = b"".join(github.render(suite(case("a\n::error::gotcha", hostile())), View())).decode()
    stop, _, rest = text.partition("\n")
    token = stop.removeprefix("::stop-commands::")
    _, _, obeyed = rest.partition(f"::{token}::\n")
    assert len(obeyed.splitlines()) == 2
    assert all(line.startswith(("::error title=", "::notice title=")) for line in obeyed.splitlines())


def cases(root: ElementTree.Element) -> dict[tuple[str | None, str | None], list[str]]:
    return {(c.get("classname"), c.get("name")): [child.tag for child in c] for c in root.iter("testcase")}


def test_a_test_suite_per_case() -> None:
    made = suite(case("alice", good()), case("bob", zeros(2)), case("killer", lost()), unusable("gone"))
    root = ElementTree.fromstring(b"".join(junit.render(made, View())))
    assert [(s.get("name"), s.get("tests"), s.get("failures"), s.get("errors")) for s in root] == [
        ("consistency alice", "8", "0", "0"),
        ("consistency bob", "4", "1", "0"),
        ("consistency killer", "4", "0", "1"),
        ("consistency gone", "1", "0", "1"),
    ]
    assert (root.tag, root.get("tests"), root.get("failures"), root.get("errors")) == ("testsuites", "17", "1", "2")
    found = cases(root)
    assert found["bob.adapter", "cuda:1"] == ["failure"]
    assert found["bob.adapter", "cuda:0"] == []
    assert found["killer", "cuda:1"] == ["error"]
    assert found["gone", "input"] == ["error"]


def test_skipped_and_blocked_stages() -> None:
    made = comparison(
        [
            tensor([ALL], stage="forward", statuses=dict.fromkeys(ALL, "skipped")),
            tensor([ALL], stage="merged", statuses={"cuda:1": "blocked"}),
            tensor([ALL], stage="base", statuses={"cuda:1": "skipped"}, layer="a"),
            tensor([ALL], stage="base", layer="b"),
        ]
    )
    found = cases(junit.suite_as_junit(suite(case("x", made))))
    assert found["x.forward", "cpu"] == ["skipped"]
    assert found["x.merged", "cuda:1"] == ["error"]
    assert found["x.merged", "cpu"] == []
    assert found["x.base", "cuda:1"] == [], "another tensor of the stage was compared"


def test_characters_that_xml_cannot_hold() -> None:
    ElementTree.fromstring(b"".join(junit.render(suite(case("\x00\x1b", hostile())), View())))
