"""Tests of one's own: their case, and what a failure of theirs shows."""

from __future__ import annotations

import pytest

# A fault for the device's worker, and a line per run, from a conftest: a run has no option for either.
CONFTEST = """
import dataclasses
from pathlib import Path

import pytest
from consistency.workflows import pipeline

real = pipeline.prepare


def prepare(options, *where):
    with Path(__file__).with_name("runs.txt").open("a") as file:
        print(options.devices, options.stages, file=file)
    return dataclasses.replace(real(options, *where), faults={"cpu": "adapter-bit-flip"})


pipeline.prepare = prepare


@pytest.fixture(scope="session")
def consistency_config(consistency_config):
    return {"base": "builtin:llama", "level": "quick", "devices": "cpu@baseline", **consistency_config}
"""

TESTS = """
import consistency
import pytest

pytestmark = pytest.mark.consistency(stages="merged")
here = pytest.mark.consistency(devices="cpu", load_paths="isolated", stages="adapter")

@here
def test_asserted(consistency_report):
    consistency.assert_consistent(consistency_report)

@here
def test_bare(consistency_report):
    assert consistency_report.verdict == "consistent"

@here
def test_in_a_condition(consistency_report):
    assert (consistency_report.verdict == "consistent") is True

@here
def test_other_words(consistency_report):
    assert "inconsistent" == "Consistent".lower() + "!"

@pytest.mark.consistency(bas="builtin:llama")
def test_misspelt(consistency_report): pass

@pytest.mark.consistency("builtin:llama")
def test_by_place(consistency_report): pass

@pytest.mark.consistency(base="")
def test_nothing_named(consistency_report): pass

@here
def test_without_the_fixture(): pass
"""

PLACE = "adapter::model.layers.0.mlp.gate_proj.lora_B"
CAUSE = "adapter · cpu · single-bit flips in lora_B of model.layers.0.mlp.gate_proj"


@pytest.fixture
def own_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_own=TESTS)
    return pytester


@pytest.mark.slow
@pytest.mark.usefixtures("warm_pytest")
def test_failures_show_tensor_device_and_cause(own_tests: pytest.Pytester) -> None:
    done = own_tests.runpytest_subprocess("--strict-markers", "-n", "2")
    done.assert_outcomes(failed=4, errors=4)
    done.stdout.fnmatch_lines_random([
        f"E *AssertionError: inconsistent: {CAUSE}*",
        f"E *assert inconsistent: {CAUSE}*",
        "E *model.layers.0.mlp.gate_proj.lora_B[[]0, 5[]] · got *bit 20 (mantissa)*1 of 2048 elements",
        f"consistency_report = <Comparison llama: inconsistent; {PLACE}; {CAUSE}>",
        "E *AssertionError: assert 'inconsistent' == 'consistent!'",
        f"FAILED test_own.py::test_asserted - AssertionError: inconsistent: {CAUSE}*",
        f"FAILED test_own.py::test_bare - assert inconsistent: {CAUSE}*",
        "ERROR test_own.py::test_misspelt - Failed: unknown option: bas",
        "  where:  @pytest.mark.consistency",
        "  hint:   did you mean base[?]",
        "ERROR test_own.py::test_by_place - Failed: *takes options by name, got 'builtin:llama'",
        "ERROR test_own.py::test_nothing_named - Failed: the test names no model: *",
        "ERROR test_own.py::test_without_the_fixture - Failed: *does nothing without the fixture consistency_report",
    ])  # fmt: skip
    runs = (own_tests.path / "runs.txt").read_text().splitlines()
    assert runs == ["('cpu',) (<standard.ADAPTER: 'adapter'>,)"], "tests with the same options share one run"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_pytest")
def test_an_ini_file_that_names_a_case(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its items stand beside the project's tests, unless somebody asks for a file of tests."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
    ini = 'consistency_base = "builtin:llama"\nconsistency_devices = "cpu"\nconsistency_stages = "adapter"'
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]\n{ini}")
    pytester.makepyfile(test_own="def test_one(): pass\ndef test_report(consistency_report): pass")
    own = ["test_own.py::test_one", "test_own.py::test_report"]
    named = "consistency::llama::run::agreement"
    for arguments, count in {(): 62, (named, "test_own.py"): 3}.items():
        done = pytester.runpytest_subprocess("--co", "-q", *arguments)
        found = [line for line in done.outlines if "::" in line]
        assert (found[:2], found[-1], len(found)) == (own, named, count)
    pytester.runpytest_subprocess("test_own.py").assert_outcomes(passed=2)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_pytest")
def test_a_report_without_a_case_is_an_error_unless_an_option_says_so(own_tests: pytest.Pytester) -> None:
    """A marker that is misspelt would make a green session."""
    own_tests.makeconftest("")
    own_tests.makepyfile(
        test_own="""
        import pytest

        @pytest.mark.consistancy(base="builtin:llama")
        def test_misspelt(consistency_report): pass

        def test_none(consistency_report): pass

        def test_several(consistency_reports): pass
        """
    )
    options = ("-o", "consistency_level=quick", "-rEs")
    done = own_tests.runpytest_subprocess(*options)
    done.assert_outcomes(errors=3, warnings=1)
    done.stdout.fnmatch_lines([
        "ERROR *::test_misspelt - Failed: no case: the marker consistancy is unknown; did you mean "
        "@pytest.mark.consistency[?]",
        "ERROR *::test_none - Failed: no case: give @pytest.mark.consistency(base=…), --consistency-base=…, *",
        "ERROR *::test_several - Failed: no case: give *",
    ])  # fmt: skip
    done = own_tests.runpytest_subprocess(*options, "--consistency-skip-without-case")
    done.assert_outcomes(errors=1, skipped=2, warnings=1)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_pytest")
@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (
            '{"bse": "builtin:llama"}',
            ["unknown option: bse", "*the fixture consistency_config", "*did you mean base[?]"],
        ),
        ("None", ["consistency_config returns no options by name, but None"]),
        (
            '{"level": "quick"}',
            ["the test names no model: give base or adapter to *.consistency or in consistency_config"],
        ),
    ],
)
def test_a_config_that_cannot_be_used(own_tests: pytest.Pytester, returned: str, told: list[str]) -> None:
    own_tests.makeconftest(
        f"import pytest\n\n@pytest.fixture(scope='session')\ndef consistency_config():\n    return {returned}\n"
    )
    own_tests.makepyfile(test_own="def test_one(consistency_report): pass")
    done = own_tests.runpytest_subprocess()
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(told)
    assert not any("During handling" in line for line in done.outlines)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_pytest")
def test_a_tolerance_that_judged_nothing_is_a_warning(own_tests: pytest.Pytester) -> None:
    """A misspelt layer passed silently."""
    own_tests.makeconftest("")
    own_tests.makepyfile(
        test_own="""
        import pytest

        @pytest.mark.consistency(base="builtin:llama", devices="cpu", stages="merged", load_paths="isolated",
                                 tolerance="layer=model.layer.0.*,atol=1,rtol=0")
        def test_one(consistency_report): pass
        """
    )
    done = own_tests.runpytest_subprocess()
    done.assert_outcomes(passed=1, warnings=1)
    done.stdout.fnmatch_lines(["*PytestWarning: tolerance layer=model.layer.0.*: matched no tensor that was checked"])
