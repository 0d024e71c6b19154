"""The rule of the root `conftest.py`: what starts a process says so."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"

_TESTS = """
import subprocess, sys, pytest

def start():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_unmarked():
    start()

@pytest.mark.process
def test_marked():
    start()

def test_without():
    pass
"""


@pytest.mark.slow
@pytest.mark.process
def test_one_that_starts_a_process_and_is_not_marked_fails(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(_TESTS)
    found = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "ignore")
    found.assert_outcomes(passed=3, errors=1)
    found.stdout.fnmatch_lines(["*ERROR at teardown of test_unmarked*", "*is not marked with pytest.mark.process: *"])
