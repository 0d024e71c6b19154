"""Items of a suite, from outside: by case, selected by case, and one run for all."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_pytest")]

# The input of one case cannot be used.
SUITE = """
devices = "cpu"
stages = ["adapter"]
level = "quick"

[[case]]
name = "plain"
base = "builtin:llama"

[[case]]
name = "other"
base = "builtin:gpt2"

[[case]]
name = "gone"
base = "builtin:gpt2"
adapter = "./gone"
"""

OPTIONS = ("--consistency-config", "nightly.toml")

# A fault in one case, planted from a conftest: the option for it exists in no command line.
PLANT = """
from consistency.workflows import suite

real = suite.prepare_suite


def prepare_suite(options):
    return real(options).with_faults({"other": {"cpu": "adapter-bit-flip"}})


suite.prepare_suite = prepare_suite
"""


@pytest.fixture(autouse=True)
def _no_other_plugins(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # importing the plugins of hypothesis and anyio takes longer than all that is tested here
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makefile(".toml", nightly=SUITE)
    pytester.makeconftest(PLANT)
    return pytester


def collected(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    done = pytester.runpytest_subprocess("--co", "-q", *OPTIONS, *arguments)
    return [line for line in done.outlines if line.startswith("consistency::")]


@pytest.mark.slow
def test_items_are_by_case(suite: pytest.Pytester) -> None:
    found = collected(suite)
    assert {one.split("::")[1] for one in found} == {"plain", "other", "gone"}
    assert "consistency::plain::adapter::model.layers.1.self_attn.v_proj.lora_B[cpu]" in found
    assert "consistency::other::adapter::transformer.h.1.attn.c_attn.lora_B[cpu]" in found
    assert [one for one in found if "::gone::" in one] == ["consistency::gone::input"]
    assert len(found) == len(set(found))
    assert set(collected(suite, "-k", "other")) == {one for one in found if "::other::" in one}
    assert collected(suite, "consistency::gone") == ["consistency::gone::input"]


@pytest.mark.slow
def test_outcomes_of_all_cases(suite: pytest.Pytester) -> None:
    done = suite.runpytest_subprocess(*OPTIONS, "--junitxml", "out.xml", "-n", "2")
    outcomes = done.parseoutcomes()
    assert (outcomes["failed"], outcomes["errors"]) == (1, 1)
    assert outcomes["passed"] > 50
    done.stdout.fnmatch_lines([
        "*no such folder for the adapter*",
        "adapter: *lora_B* is outside on cpu (bit-flip)",
        "inconsistent: 1 of 3 cases is inconsistent, 1 could not be checked and 1 is consistent",
    ])  # fmt: skip
    root = ElementTree.parse(suite.path / "out.xml").getroot()
    (failed,) = [case for case in root.iter("testcase") if case.find("failure") is not None]
    assert failed.get("classname") == "consistency.other.adapter"
    assert collected(suite, "--lf") == [
        "consistency::other::adapter::transformer.h.0.attn.c_proj.lora_B[cpu]", "consistency::gone::input",
    ]  # fmt: skip


@pytest.mark.slow
def test_only_selected_cases_are_captured(suite: pytest.Pytester) -> None:
    done = suite.runpytest_subprocess(*OPTIONS, "--consistency-out", "out", "-k", "plain and v_proj and layers.1")
    assert done.parseoutcomes()["passed"] == 2
    assert [path.name for path in (suite.path / "out" / "cases").iterdir()] == ["plain"]
    records = suite.path / "out" / "cases" / "plain" / "captures" / "workers" / "cpu.isolated" / "records.jsonl"
    assert {json.loads(line)["layer"] for line in records.read_text().splitlines()} == {
        "model.layers.1.self_attn.v_proj"
    }


@pytest.mark.slow
def test_reports_by_case(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_own="""
        import pytest

        def test_both(consistency_reports):
            assert list(consistency_reports) == ["plain", "other", "gone"]
            assert consistency_reports["plain"].verdict == "consistent"
            assert consistency_reports["other"].verdict == "inconsistent"

        def test_one(consistency_report):
            pass
        """
    )
    done = suite.runpytest_subprocess(*OPTIONS, "test_own.py", "-k", "test_own")
    done.stdout.fnmatch_lines(["collected * items / * deselected / 2 selected"])
    done.assert_outcomes(passed=1, errors=1, deselected=done.parseoutcomes()["deselected"])
    done.stdout.fnmatch_lines(["*the configuration has 3 cases: use consistency_reports*"])
