"""Compare what was made apart: captures from hosts and days, folders of suites case by case, and weight files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from consistency import plugins
from consistency.capture import origin
from consistency.capture.bounded import read_regular
from consistency.capture.claim import scratch_folder
from consistency.capture.folder import CASES, Capture, holds_capture
from consistency.capture.transport import is_remote, travels
from consistency.capture.wording import some
from consistency.case.engine_file import EngineFile
from consistency.case.suite import folder_name
from consistency.comparison.result import Comparison, with_provenance
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.comparison.suite import CaseResult, SuiteResult
from consistency.errors import CaptureError, ConsistencyError, UsageError
from consistency.launch.engine import Watcher
from consistency.report.runs import SUITE
from consistency.report.summarize import summarize
from consistency.text import one_line
from consistency.workflows import report_folder
from consistency.workflows.judging import compare_captures, read_captures
from consistency.workflows.past import NO_PAST, Past, PastOfSuite, resolved
from consistency.workflows.report_folder import output, write_reports
from consistency.workflows.suite import slowest_s, suite_output, write_suite


def compare_folders(
    given: Sequence[Capture | str | Path],
    out: Path | None,
    *,
    replace: bool = False,
    groups: SiteGroups = NO_GROUPS,
    past: Past = NO_PAST,
    engines: Sequence[EngineFile] = (),
    watch: Watcher = lambda *_: None,
) -> Comparison:
    """Compare captures that were made apart; write the report to `out`.

    They are given read, or as folders, ZIP files or URLs of captures or of the `--out` folders of runs. `engines` are
    outputs of inference engines, which are judged for the case of the first capture. The result is compared with, and
    added to, a history.
    """
    started = time.monotonic()
    folders = [one.folder if isinstance(one, Capture) else Path(one) for one in given if _is_local(one)]
    with output(out, replace=replace, reads=folders), scratch_folder("compare") as scratch:
        captures, unread = read_captures(given, scratch)
        if engines:
            captures.append(_engines(captures[0], engines, scratch, watch))
        comparison = _compared(captures, unread, given, groups)
        comparison = past.judged(captures, comparison, out)
        comparison = with_provenance(comparison, time.monotonic() - started)
        return write_reports(comparison, out)


def compare_read(folders: Sequence[Path], groups: SiteGroups = NO_GROUPS) -> tuple[list[Capture], Comparison]:
    """Compare captures in folders of this host, and write nothing; return them with their comparison."""
    captures, unread = read_captures(folders)
    return captures, _compared(captures, unread, folders, groups)


def _compared(
    captures: Sequence[Capture],
    unread: Sequence[str],
    given: Sequence[Capture | str | Path],
    groups: SiteGroups,
) -> Comparison:
    comparison = compare_captures(captures, unread=unread, groups=groups)
    return msgspec.structs.replace(comparison, captures=tuple(map(_place, given)))


def _engines(first: Capture, files: Sequence[EngineFile], scratch: Path, watch: Watcher) -> Capture:
    """Return a capture of the outputs of inference engines, judged for the case of another capture.

    Raises
    ------
    UsageError
        Nothing here judges them.
    """
    for _, judged in plugins.offered("engine_captures"):
        found: Capture = judged(first, files, scratch / "engines", watch)
        return found
    extra = plugins.absent("options").get("engine_outputs", "")
    raise UsageError(plugins.not_installed("--engine-outputs", extra), hint=plugins.INSTALL)


def _place(one: Capture | str | Path) -> str:
    if isinstance(one, Capture):
        return str(one.folder)
    return str(one) if is_remote(str(one)) else str(Path(one).resolve())


def _is_local(one: Capture | str | Path) -> bool:
    return isinstance(one, Capture) or not travels(str(one))


class _ListedCase(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed of a case in `suite.json`, which also lists cases that have no capture."""

    name: str
    error: str | None = None


class _Listed(msgspec.Struct, frozen=True, kw_only=True):
    cases: tuple[_ListedCase, ...]


def are_suites(given: Sequence[str | Path]) -> bool:
    """Tell whether folders of suites are given, or single captures.

    Raises
    ------
    UsageError
        Both are given.
    """
    suites = [one for one in given if _is_suite(one)]
    singles = [str(one) for one in given if not _is_suite(one)]
    if suites and singles:
        raise UsageError(
            "a suite cannot be compared with a single capture",
            got=some(singles),
            wanted="folders of suites only",
            hint=f"name the case of the suite: {suites[0]}/{CASES}/NAME",
        )
    return bool(suites)


def compare_suites(
    given: Sequence[str | Path],
    out: Path | None,
    *,
    replace: bool = False,
    groups: SiteGroups = NO_GROUPS,
    past: Past = NO_PAST,
) -> SuiteResult:
    """Compare the cases of the same name in folders of suites, made by `run` or `capture`; write the report to `out`.

    A case that fewer than two of several folders hold is not compared, and its result says so. One that some folders
    lack is compared without them, and that is among what was not checked. A history gets one entry for all cases.
    """
    started = time.monotonic()
    folders = [Path(one) for one in given]
    cases = _cases(folders)
    entry = past.suite_entry()
    with suite_output(out, replace=replace, reads=folders) as target:
        keep = None if out is None else target
        results = [_compare_case(at, name, folders, keep, past, groups, entry) for at, name in cases.items()]
        suite = SuiteResult(
            host=origin.host(),
            command=origin.command(),
            name=", ".join(dict.fromkeys(folder.resolve().name for folder in folders)),
            cases=tuple(results),
            elapsed_s=time.monotonic() - started,
        )
        suite = write_suite(suite, out)
        if entry is not None:
            suite = entry.commit(suite, report=resolved(out))
    return suite


def _compare_case(
    place: str,
    name: str | None,
    folders: Sequence[Path],
    target: Path | None,
    past: Past,
    groups: SiteGroups,
    entry: PastOfSuite | None,
) -> CaseResult:
    """Compare one case, and write its report; `place` is its folder in that of each suite."""
    having = [folder for folder in folders if holds_capture(folder / place)]
    lacking = [str(folder) for folder in folders if folder not in having]
    try:
        if len(having) < min(2, len(folders)):
            raise _not_comparable(place, having, folders)
        captures, comparison = compare_read([folder / place for folder in having], groups)
    except ConsistencyError as error:
        return CaseResult.of_error(name or Path(place).name, place, error)
    name = name or comparison.case
    comparison = past.accepted(comparison) if entry is None else entry.add(name, captures, comparison)
    if lacking:
        text = f"case {name} in {some(lacking)}, without a capture of it"
        comparison = msgspec.structs.replace(comparison, not_checked=(*comparison.not_checked, text))
    if target is not None:
        (target / place).mkdir(parents=True, exist_ok=True)
        comparison = report_folder.write_reports(with_provenance(comparison), target / place)
    return summarize(name, place, comparison, slowest_s(comparison))


def _not_comparable(place: str, having: Sequence[Path], folders: Sequence[Path]) -> CaptureError:
    """Return why a case is not compared, with what its suites say of it."""
    known = {folder: _listed(folder).get(place) for folder in folders if folder not in having}
    texts = [f"{folder}: {_reason(case)}" for folder, case in known.items()]
    if not having:
        return CaptureError("no folder has a capture of this case", where=place, got="; ".join(texts))
    return CaptureError(
        f"only {having[0]} has a capture of this case",
        where=place,
        got="; ".join(texts),
        wanted="a capture of it in two folders",
    )


def _reason(case: _ListedCase | None) -> str:
    if case is None:
        return "no such case"
    return "no capture" if case.error is None else one_line(case.error.partition("\n")[0])


def _cases(folders: Sequence[Path]) -> dict[str, str | None]:
    """Return the cases of all suites, by their folder in that of each suite: those of the first one in its order.

    A case has its name where a suite lists it; otherwise its capture knows the name.
    """
    found: dict[str, str | None] = {}
    for folder in folders:
        found |= {place: found.get(place) or case.name for place, case in _listed(folder).items()}
        for home in sorted((folder / CASES).glob("*")):
            if holds_capture(home):
                found.setdefault(f"{CASES}/{home.name}", None)
    return found


def _listed(folder: Path) -> dict[str, _ListedCase]:
    """Return the cases that a suite lists, by folder; a file from elsewhere must not name any other path."""
    path = folder / SUITE
    try:
        cases = msgspec.json.decode(read_regular(path, folder), type=_Listed).cases
    except FileNotFoundError:
        return {}  # of captures alone
    except OSError as error:
        raise CaptureError("cannot read", where=path, got=error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CaptureError(f"{path.name} is damaged", where=path, got=error) from None
    return {f"{CASES}/{folder_name(case.name)}": case for case in cases}


def _is_suite(one: str | Path) -> bool:
    if isinstance(one, str) and travels(one):
        return False  # a suite has no such form
    folder = Path(one)
    return not holds_capture(folder) and ((folder / CASES).is_dir() or (folder / SUITE).exists())
