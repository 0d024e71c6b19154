"""What all tests share: no network, one property-test profile, and pytest's own tester for the plugin."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester"]

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)  # what is printed is compared as a pipe has it

if importlib.util.find_spec("hypothesis"):  # not in the extra `pytest`, with which the README runs the plugin here
    from hypothesis import HealthCheck, settings

    # machines are shared: an example may take long for reasons that are not ours
    settings.register_profile("consistency", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("consistency")


_PROCESSES = re.compile(
    r"runpytest_subprocess\(|run_on_double\(|double\.python\(|\bcli\(|pipeline\.run\(|processes=True|"
    r"Popen\(|subprocess\.run\("
)
"""What starts a process in a file of tests."""

_PROCESS_S, _TEST_S = 5.0, 0.05
"""Seconds that a process and a test take about, on two cores: enough to tell the long files from the others."""


class _LongestFirst(OrderedDict[str, dict[str, bool]]):
    """Files of tests that wait for a process of xdist, which takes the longest one.

    xdist sorts them by how many tests they have: those that start processes have few, would come last, and one process
    would wait minutes for the other.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:  # noqa: ARG002 - the one that xdist calls
        longest = max(self, key=self._seconds)
        return longest, self.pop(longest)

    def _seconds(self, file: str) -> float:
        return _PROCESS_S * _processes_in(self._root / file) + _TEST_S * len(self[file])


@functools.cache
def _processes_in(file: Path) -> int:
    return len(_PROCESSES.findall(file.read_text(encoding="utf-8"))) if file.is_file() else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests on one process, so that a run which they share is made once; take the longest files first."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler.workqueue = _LongestFirst(config.rootpath)
    return scheduler
