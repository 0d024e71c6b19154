"""The Python interface: `run`, `run_suite`, `compare`, `load_report`, `assert_consistent`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from consistency.capture.folder import Capture
from consistency.case.case import Case
from consistency.case.options import Edge, Options
from consistency.case.reading import as_text, make_options
from consistency.case.suite import gather_suite
from consistency.comparison.result import Comparison
from consistency.comparison.site_groups import NO_GROUPS, read_site_groups
from consistency.comparison.suite import SuiteResult
from consistency.errors import UsageError
from consistency.launch.scheduler import Watcher
from consistency.report.findings import problems
from consistency.workflows import comparing, pipeline, suite
from consistency.workflows.past import opened_past
from consistency.workflows.pipeline import Report
from consistency.workflows.report_folder import read_comparison

__all__ = [
    "Comparison",
    "Report",
    "SuiteResult",
    "assert_consistent",
    "compare",
    "load_report",
    "run",
    "run_suite",
]

AnyPath = str | os.PathLike[str]


def run(
    case: Case | Options | None = None,
    *,
    devices: str | Iterable[str] | None = None,
    out: AnyPath | None = None,
    timeout_s: float | None = None,
    stall_s: float | None = None,
    threads: int | None = None,
    replace: bool = False,
    history: AnyPath | None = None,
    baseline: AnyPath | None = None,
    watch: Watcher | None = None,
    **options: Any,
) -> Report:
    """Run a case on devices and compare the results.

    Parameters
    ----------
    case : Case or Options, optional
        What is checked; without it, the built-in case, or what the keywords name.
    devices : str or iterable of str, optional
        `auto`, or specs such as `cpu`, `cuda:0`, `cpu@avx2`.
    out : path, optional
        Folder for `report.json` and `captures/`; nothing is kept without it.
    timeout_s, stall_s : float
        Limits per worker: in total, and between two events.
    replace : bool
        Overwrite an earlier run's results in `out`.
    history : path or str, optional
        Earlier runs to compare with and append to.
    baseline : path, optional
        Accepted findings.
    watch : callable, optional
        Called with the name of a worker and each of its events.
    **options
        Options by name, as in a TOML file (`base`, `adapter`, `dtype`, `stages`, …); they win over those of `case`.

    Raises
    ------
    ConsistencyError
        The input cannot be used, or the capture cannot be written. A mismatch is never raised.
    """
    where = {"devices": devices, "timeout": timeout_s, "stall": stall_s, "threads": threads}
    named_options = dict(options)
    named_options |= {name: value for name, value in where.items() if value is not None}
    if isinstance(case, Case):
        if options:
            raise TypeError(f"a complete case takes no further options: {', '.join(sorted(options))}")
        plan = pipeline.plan_of(case, make_options(named_options))
    elif case is not None and not isinstance(case, Options):
        raise UsageError(
            "not a case", where="run()", got=repr(case), wanted="a Case or Options", hint="name the model by base="
        )
    else:
        plan = pipeline.prepare(make_options(named_options, case or Options()))
    target = None if out is None else Path(out)
    return pipeline.run(
        plan,
        target,
        watch=watch or (lambda *_: None),
        replace=replace,
        past=opened_past(history, baseline),
    )


def run_suite(
    config: AnyPath | None = None,
    *,
    cases: Iterable[str] = (),
    out: AnyPath | None = None,
    replace: bool = False,
    history: AnyPath | None = None,
    baseline: AnyPath | None = None,
    watch: Watcher | None = None,
    fail_fast: bool = False,
    **options: Any,
) -> SuiteResult:
    """Run many cases with one set of workers.

    Parameters
    ----------
    config : path, optional
        TOML file with `[[case]]` tables.
    cases : iterable of str, optional
        Patterns of the names of the cases to check; all without it.
    out : path, optional
        Folder for the suite's files and `cases/NAME/`, each with what `run` leaves; nothing is kept without it.
    replace, history, baseline, watch
        As for `run`.
    fail_fast : bool
        Leave the other cases unchecked as soon as one is not consistent.
    **options
        Options by name; they win over those of the file. `adapter` may be a list or a pattern (`adapters/*`), and
        `dtype` a list: each adapter is then checked in each dtype.

    Returns
    -------
    SuiteResult
        What is kept of each case; the comparison of a case is in `out` alone.

    Raises
    ------
    UsageError
        They describe no suite.
    ConsistencyError
        A capture cannot be written. A case whose input cannot be used is a result, never raised.
    """
    file = None if config is None else Path(config)
    suite_options = gather_suite(file, as_text(options), Edge.TOML)
    if suite_options is None:
        raise UsageError("there is only one case", wanted="a file with [[case]], several adapters, or several dtypes")
    target = None if out is None else Path(out)
    return suite.run_suite(
        suite.prepare_suite(suite_options.chosen(tuple(cases))),
        target,
        watch=watch or (lambda *_: None),
        replace=replace,
        past=opened_past(history, baseline),
        fail_fast=fail_fast,
    )


def compare(
    captures: Iterable[Capture | AnyPath],
    *,
    groups: AnyPath | None = None,
    history: AnyPath | None = None,
    baseline: AnyPath | None = None,
) -> Comparison:
    """Compare captures (folders, ZIP files, URLs, or read ones); the first one's reference worker is the reference.

    `groups` is a file that maps hosts to what the site groups them by; `history` and `baseline` are as for `run`.
    """
    site_groups = NO_GROUPS if groups is None else read_site_groups(Path(groups))
    sources: list[Capture | str] = []
    for capture in captures:
        source = capture if isinstance(capture, Capture) else as_text(capture)
        sources.append(source)
    return comparing.compare_folders(
        sources,
        None,
        groups=site_groups,
        past=opened_past(history, baseline),
    )


def load_report(path: AnyPath) -> Report:
    """Read the report of a run: `report.json`, its folder, or a folder of dated runs, whose latest run is read.

    Raises
    ------
    UsageError
        There is no report of a run, or its schema is not supported.
    """
    comparison, folder = read_comparison(Path(path))
    return Report(comparison=comparison, folder=folder, elapsed_s=comparison.elapsed_s or 0.0)


def assert_consistent(report: Report | Comparison | SuiteResult) -> None:
    """Raise an error with the verdict, tensors, devices and causes unless everything is consistent.

    Raises
    ------
    AssertionError
        The first line of its message is the verdict in a sentence.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    if report.verdict != "consistent":
        result = report.comparison if isinstance(report, Report) else report
        raise AssertionError("\n".join(problems(result)))
