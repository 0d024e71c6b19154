"""The pytest plugin: one item per case, stage, layer tensor and device.

Every pytest session of an environment that has this package imports this module, so it imports pytest and the table of
options only; the rest is imported when an option or a fixture of the plugin is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from consistency.case.options import Edge, add_options

if TYPE_CHECKING:
    from consistency.comparison.result import Comparison
    from consistency.pytest_plugin.session import Session
    from consistency.worker.wrapper_check import WrapperReport
    from consistency.workflows.pipeline import Report

_SESSION: pytest.StashKey[Session] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `consistency run`."""
    group = parser.getgroup("consistency", "do a base model and an adapter produce the same numbers on every device?")
    group.addoption("--consistency-config", metavar="FILE", help="TOML file of options; the options below win")
    add_options(group.addoption, Edge.PYTEST, prefix="consistency_")
    group.addoption("--consistency-out", metavar="DIR", help="folder for the reports and captures/, which are replaced")


_TRIGGERS = ("consistency_config", "consistency_base", "consistency_adapter")


def _is_used(config: pytest.Config) -> bool:
    return any(config.getoption(name, None) is not None for name in _TRIGGERS)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the case, and take the plugin's own arguments, before pytest looks for files."""
    if not _is_used(config):
        return
    from consistency.errors import ConsistencyError
    from consistency.pytest_plugin.session import Session

    try:
        session = Session.of(config)
    except ConsistencyError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_SESSION] = session
    config.add_cleanup(session.close)
    session.take_arguments(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Start one xdist worker per device where the plugin is used."""
    session = config.stash.get(_SESSION, None)
    return None if session is None else len(session.devices)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass an xdist worker the folder of the session's one run."""
    session = node.config.stash.get(_SESSION, None)
    if session is not None:
        node.workerinput["consistency"] = session.to_worker()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the items, before -k, --lf and others select from them."""
    found = config.stash.get(_SESSION, None)
    if found is None:
        return
    from consistency.pytest_plugin.items import make_items

    own = make_items(session, found)
    items.extend(own)
    # pytest counts what it reports as collected
    report = pytest.CollectReport(nodeid="consistency", outcome="passed", longrepr=None, result=list(own))
    config.hook.pytest_collectreport(report=report)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the selected items: only what they need is captured."""
    found = session.config.stash.get(_SESSION, None)
    if found is not None:
        from consistency.pytest_plugin.items import selection

        found.selected = selection(session.items)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name case and devices."""
    found = config.stash.get(_SESSION, None)
    return None if found is None else f"consistency: {found.headline}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the verdict of the run, if there was one."""
    found = config.stash.get(_SESSION, None)
    lines = [] if found is None else list(found.summary())
    if lines:
        terminalreporter.write_sep("-", "consistency")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def deterministic() -> Iterator[dict[str, Any]]:
    """Pin every setting that changes a torch result, seed every generator, and restore both after the test.

    Yields the requested values by setting.
    """
    from consistency.worker.determinism import deterministic as pinned

    with pinned() as asked:
        yield asked


@pytest.fixture(scope="session")
def consistency_devices(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """Return the names of the devices that `--consistency-devices` selects; `auto` without it."""
    from consistency.devices.discovery import select
    from consistency.devices.spec import parse_devices
    from consistency.errors import ConsistencyError

    text = pytestconfig.getoption("consistency_devices", None) or "auto"
    try:
        return tuple(info.spec.name for info in select(parse_devices(text)))
    except ConsistencyError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def consistency_run() -> Callable[..., Report]:
    """Return `consistency.run`, for a case of the test."""
    from consistency.workflows.api import run

    return run


@pytest.fixture(scope="session")
def consistency_check_wrapped() -> Callable[..., WrapperReport]:
    """Return `consistency.check_wrapped`; it fails the test with one sentence per problem."""
    from consistency.worker.wrapper_check import check_wrapped

    def check(wrapped: Any, plain: Any, **options: Any) -> WrapperReport:
        report = check_wrapped(wrapped, plain, **options)
        if not report.passed:
            pytest.fail(str(report), pytrace=False)
        return report

    return check


@pytest.fixture(scope="session")
def consistency_reports(pytestconfig: pytest.Config) -> Mapping[str, Comparison]:
    """Return the comparisons of the cases that the options name, by name; they run once per session."""
    session = pytestconfig.stash.get(_SESSION, None)
    if session is None:
        pytest.skip("no case: give --consistency-base, --consistency-adapter or --consistency-config")
    return session.comparisons()


@pytest.fixture(scope="session")
def consistency_report(consistency_reports: Mapping[str, Comparison]) -> Comparison:
    """Return the comparison of the one case that the options name."""
    if len(consistency_reports) > 1:
        pytest.fail(f"the configuration has {len(consistency_reports)} cases: use consistency_reports", pytrace=False)
    return next(iter(consistency_reports.values()))
