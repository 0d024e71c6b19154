"""The pytest plugin: one item per case, stage, layer tensor and device.

Every pytest session of an environment that has this package imports this module, so it imports pytest and the table of
options only; the rest is imported when an option or a fixture of the plugin is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from consistency.case.options import Edge, Source, add_ini_options, add_options

if TYPE_CHECKING:
    from consistency.comparison.result import Comparison
    from consistency.extras.peft_api.wrapping.report import WrapperReport
    from consistency.pytest_plugin.session import Session
    from consistency.workflows.pipeline import Report

_SESSION: pytest.StashKey[Session] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `consistency run`, each on the command line and in the ini file."""
    group = parser.getgroup("consistency", "do a base model and an adapter produce the same numbers on every device?")
    add_options(group.addoption, Edge.PYTEST, prefix="consistency_")
    add_ini_options(parser.addini, Edge.PYTEST_INI)
    for name, metavar, text in _OWN_OPTIONS:
        group.addoption(Edge.PYTEST.spell(name), metavar=metavar, help=text)
        parser.addini(Edge.PYTEST_INI.spell(name), text, default=None)
    group.addoption(
        "--consistency-skip-without-case",
        action="store_true",
        help="skip a test that asks for a report and has no case; without this it is an error",
    )
    group.addoption("--consistency-arch", action="append", metavar="PATTERN", help=_ARCH)
    parser.addini("consistency_arch", _ARCH, type="linelist", default=None)


_OWN_OPTIONS = (
    ("config", "FILE", "TOML file of options; the options beside it win"),
    ("out", "DIR", "folder for the reports and captures/, which are replaced"),
    ("history", "URL", "history of runs to compare with and append to"),
    ("baseline", "FILE", "accepted findings (consistency baseline accept)"),
)
_ARCH = "select the items of devices whose architecture contains this text, such as sm_90; may be repeated"
# Options of which one at least names a case.
_TRIGGERS = ("consistency_config", "consistency_base", "consistency_adapter")


def _is_used(config: pytest.Config) -> bool:
    """Return whether command line or ini file names a case."""
    return _is_used_on_command_line(config) or any(config.getini(name) is not None for name in _TRIGGERS)


def _is_used_on_command_line(config: pytest.Config) -> bool:
    return any(config.getoption(name, None) is not None for name in _TRIGGERS)


def _makes_items(config: pytest.Config) -> bool:
    """Return whether the session has the items of its case.

    An ini file is no reason to check a model when somebody asks for one test file.
    """
    if not _is_used(config):
        return False
    if hasattr(config, "workerinput"):  # an xdist worker does as its controller
        return "consistency" in config.workerinput
    return (
        _is_used_on_command_line(config)
        or config.args_source is not pytest.Config.ArgsSource.ARGS
        or any(argument.startswith("consistency::") for argument in config.args)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the case, and take the plugin's own arguments, before pytest looks for files."""
    config.addinivalue_line("markers", "consistency(**options): options of the case that consistency_report checks")
    if not _makes_items(config):
        return
    from consistency.errors import ConsistencyError
    from consistency.pytest_plugin.session import Session

    try:
        session = Session.from_config(config)
    except ConsistencyError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_SESSION] = session
    config.add_cleanup(session.close)
    session.take_arguments(config, items_alone=_is_used_on_command_line(config))


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
    case_session = config.stash.get(_SESSION, None)
    if case_session is None:
        return
    from consistency.pytest_plugin.items import make_items, select_architectures

    made = make_items(session, case_session)
    # pytest counts the items of this report among those that it has collected.
    report = pytest.CollectReport(nodeid="consistency", outcome="passed", longrepr=None, result=list(made))
    config.hook.pytest_collectreport(report=report)
    selected, deselected = select_architectures(made, case_session.given.architectures)
    items.extend(selected)
    if deselected:
        config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the selected items: only what they need is captured."""
    case_session = session.config.stash.get(_SESSION, None)
    if case_session is not None:
        from consistency.pytest_plugin.items import selection

        case_session.selected = selection(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose marker would do nothing."""
    is_marked = any(marker.name == "consistency" for marker in item.own_markers)
    if is_marked and "consistency_report" not in getattr(item, "fixturenames", ()):
        pytest.fail("@pytest.mark.consistency does nothing without the fixture consistency_report", pytrace=False)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name case and devices."""
    case_session = config.stash.get(_SESSION, None)
    return None if case_session is None else f"consistency: {case_session.headline}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the worst layer of each architecture and stage, and the verdict of the run, if there was one."""
    case_session = config.stash.get(_SESSION, None)
    if case_session is None:
        return
    layers = list(case_session.layers())
    if layers:
        terminalreporter.write_sep("-", "consistency: worst layer by architecture and stage")
        for status, line in layers:
            terminalreporter.write_line(line, red=status in ("outside", "missing", "unexpected"))
    lines = list(case_session.summary())
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

    with pinned() as settings:
        yield settings


@pytest.fixture(scope="session")
def consistency_config(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Return the options of command line and ini file by name, as `consistency.run` takes them; made to be overridden.

    A test's own case starts from them; `@pytest.mark.consistency(...)` wins.
    """
    return _default_options(pytestconfig)


def _default_options(config: pytest.Config) -> dict[str, Any]:
    from consistency.errors import ConsistencyError
    from consistency.pytest_plugin.given import read_given

    try:
        return read_given(config).case_options()
    except ConsistencyError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def consistency_devices(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """Return the names of the devices that `--consistency-devices` selects; `auto` without it."""
    from consistency.devices.discovery import select
    from consistency.devices.spec import parse_devices
    from consistency.errors import ConsistencyError

    devices = _default_options(pytestconfig).get("devices", "auto")
    try:
        with Source(edge=Edge.PYTEST).naming():
            return tuple(info.spec.name for info in select(parse_devices(devices)))
    except ConsistencyError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def consistency_run(pytestconfig: pytest.Config) -> Callable[..., Report]:
    """Return `consistency.run`, for a case of the test."""
    from consistency.pytest_plugin.failures import show_reason
    from consistency.workflows.api import run

    @functools.wraps(run)
    def run_and_explain(*case: Any, **options: Any) -> Report:
        report = run(*case, **options)
        show_reason(pytestconfig, report.comparison)
        return report

    return run_and_explain


@pytest.fixture(scope="session")
def consistency_check_wrapped() -> Callable[..., WrapperReport]:
    """Return `consistency.check_wrapped`; it fails the test with one sentence per problem."""
    from consistency.extras.peft_api.wrapping.check import check_wrapped

    def check(wrapped: Any, plain: Any, **options: Any) -> WrapperReport:
        report = check_wrapped(wrapped, plain, **options)
        if not report.passed:
            pytest.fail(str(report), pytrace=False)
        return report

    return check


@pytest.fixture
def consistency_within_rounding(
    consistency_devices: tuple[str, ...],
    deterministic: Mapping[str, Any],  # noqa: ARG001 - the settings with which the products are judged
) -> Callable[..., None]:
    """Return `consistency.testing.assert_within_rounding` on each device that `--consistency-devices` selects.

    Variants such as `cpu@baseline` need a process of their own and are left out.
    """
    from consistency.testing import assert_within_rounding

    def check(function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
        __tracebackhide__ = True
        for device in consistency_devices:
            if "@" not in device:
                assert_within_rounding(function, *inputs, device=device, **options)

    return check


@pytest.fixture(scope="session")
def consistency_reports(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Comparison]:
    """Return the comparisons of the cases that the options name, by name; they run once per session."""
    session = pytestconfig.stash.get(_SESSION, None)
    if session is None:
        from consistency.pytest_plugin.own_case import shared_folder, without_case, without_items

        if not _is_used(pytestconfig):
            without_case(pytestconfig)
        session = without_items(pytestconfig, shared_folder(tmp_path_factory))
    return session.comparisons()


@pytest.fixture
def consistency_report(request: pytest.FixtureRequest, consistency_config: Mapping[str, Any]) -> Comparison:
    """Return the comparison of the test's case: of its marker and `consistency_config`, or the one of the session."""
    from consistency.pytest_plugin.failures import show_reason
    from consistency.pytest_plugin.own_case import own_comparison, own_options, shared_folder, without_case

    options, marker_options = own_options(request.node, consistency_config)
    is_of_session = not marker_options and options == _default_options(request.config)
    if not is_of_session:
        folder = shared_folder(request.getfixturevalue("tmp_path_factory"))
        comparison = own_comparison({**options, **marker_options}, folder)
    else:
        if not _is_used(request.config):
            without_case(request.config, request.node)
        reports = request.getfixturevalue("consistency_reports")
        if len(reports) > 1:
            pytest.fail(f"the configuration has {len(reports)} cases: use consistency_reports", pytrace=False)
        comparison = next(iter(reports.values()))
    show_reason(request.config, comparison)
    return comparison
