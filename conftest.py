"""What all tests share: no network, one property-test profile, pytest's own tester, and which start processes."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

pytest_plugins = ["pytester"]

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)  # what is printed is compared as a pipe has it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell has its background ignore it, and so would all that a test starts, to interrupt it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis"):  # not in the extra `pytest`, with which the README runs the plugin here
    from hypothesis import HealthCheck, settings

    # machines are shared: an example may take long for reasons that are not ours
    settings.register_profile("consistency", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("consistency")


_PROCESS_FIXTURES = frozenset(
    {"browser", "cli", "cli_here", "double", "finished_run", "kernel_library", "machine", "open_page", "ray_nodes",
     "run_on_double", "run_suite_with_faults", "run_with_faults", "slurm", "warm", "warm_double", "warm_pytest"}
)  # fmt: skip
"""Fixtures that start processes, or run whole cases in this one."""

_PROCESS_MARKS = ("aarch64", "cluster", "engines", "gpu", "large", "sanitizers", "slow")
"""Marks of tests that do, or that take long: `-m "not process"` leaves all of them out."""

_MOST_S = {False: 1.0, True: 15.0}
"""Seconds that a test which is not marked `slow` may take: without and with a process."""

_PROBE = "consistency.devices.probe"
_STARTED: list[str] = []
"""Processes of Python that were started since the last test."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests whose fixtures start processes; take the files that have most of them first.

    A file of many processes that came last would keep one process of xdist waiting for the other.
    """
    for item in items:
        starts = _PROCESS_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if starts or any(item.get_closest_marker(name) for name in _PROCESS_MARKS):
            item.add_marker(pytest.mark.process)
    marked = Counter(item.path for item in items if item.get_closest_marker("process"))
    items.sort(key=lambda item: -marked[item.path])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the tests that take longer than those of a plain `pytest` may."""
    took: defaultdict[str, float] = defaultdict(float)
    marks: dict[str, Any] = {}
    for report in (one for found in terminalreporter.stats.values() for one in found):
        if isinstance(report, pytest.TestReport):
            took[report.nodeid] += report.duration
            marks[report.nodeid] = report.keywords
    long = [name for name, s in took.items() if s > _MOST_S["process" in marks[name]] and "slow" not in marks[name]]
    if long:
        terminalreporter.section("slower than a test without the mark slow may be, on a quiet machine")
        for name in sorted(long, key=lambda name: -took[name]):
            terminalreporter.line(f"{took[name]:6.1f} s  {name}")


def pytest_collection_finish() -> None:
    """Leave what the imports made out of every garbage collection, and give each process its share of the cores.

    A worker's session collects garbage, which takes a quarter of a second with torch, transformers and all tests in the
    process. Threads beyond the cores spin while they wait for one another: with two per core, the factors of a tiny
    matrix took twenty times the processor's time. So a process of xdist has the number that a run gives its workers.
    Processes that tests start are not limited, and tests about threads ask for their own number.
    """
    gc.collect()
    gc.freeze()
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch = sys.modules.get("torch")
    if processes > 1 and torch is not None:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests on one process, so that a run which they share is made once, in the order above."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def _marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that starts a process and is not marked: `-m "not process"` would take long for no reason."""
    yield
    started = [*_STARTED]
    _STARTED.clear()
    if started and request.node.get_closest_marker("process") is None:
        pytest.fail(f"this test starts a process, and is not marked with pytest.mark.process: {started[0]}")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    # a torch that is built for accelerators is asked for them once, in a process, by whichever test comes first
    if event == "subprocess.Popen" and os.fspath(arguments[0]) == sys.executable and _PROBE not in arguments[1]:
        _STARTED.append(" ".join(map(str, arguments[1]))[:200])


sys.addaudithook(_watch)
