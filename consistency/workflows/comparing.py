"""Comparisons of captures from several hosts or days, and of folders of suites, case by case."""

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
from consistency.launch.scheduler import Watcher
from consistency.report.runs import SUITE
from consistency.report.summarize import summarize
from consistency.text import one_line
from consistency.workflows import report_folder
from consistency.workflows.judging import compare_captures, read_captures
from consistency.workflows.past import NO_PAST, Past, PastOfSuite, held_against, resolved
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

    The result is compared with, and added to, a history.

    Parameters
    ----------
    given : sequence of Capture, str or Path
        The captures, read, or as folders, ZIP files or URLs of captures or of the `--out` folders of runs.
    engines : sequence of EngineFile
        Outputs of inference engines, which are judged for the case of the first capture.
    """
    started = time.monotonic()
    with output(out, replace=replace, reads=_local_folders(given)), scratch_folder("compare") as scratch:
        captures, unread = read_captures(given, scratch)
        if engines:
            captures.append(_capture_engines(captures[0], engines, scratch, watch))
        comparison = _compare(captures, unread, given, groups)
        comparison = past.judged(captures, comparison, out)
        comparison = with_provenance(comparison, time.monotonic() - started)
        return write_reports(comparison, out)


def compare_read(folders: Sequence[Path], groups: SiteGroups = NO_GROUPS) -> tuple[list[Capture], Comparison]:
    """Compare captures in folders of this host, and write nothing; return them with their comparison."""
    captures, unread = read_captures(folders)
    return captures, _compare(captures, unread, folders, groups)


def _compare(
    captures: Sequence[Capture],
    unread: Sequence[str],
    sources: Sequence[Capture | str | Path],
    groups: SiteGroups,
) -> Comparison:
    """Compare captures; the comparison names the places of their sources."""
    comparison = compare_captures(captures, unread=unread, groups=groups)
    return msgspec.structs.replace(comparison, captures=tuple(map(_source_name, sources)))


def _capture_engines(first: Capture, files: Sequence[EngineFile], scratch: Path, watch: Watcher) -> Capture:
    """Return a capture of the outputs of inference engines, judged for the case of another capture.

    Raises
    ------
    UsageError
        No plug-in judges them.
    """
    for _, capture_outputs in plugins.offered("engine_captures"):  # the first plug-in that judges them
        capture: Capture = capture_outputs(first, files, scratch / "engines", watch)
        return capture
    extra = plugins.absent("options").get("engine_outputs", "")
    raise UsageError(plugins.not_installed("--engine-outputs", extra), hint=plugins.INSTALL)


def _source_name(source: Capture | str | Path) -> str:
    """Return the folder or URL of a source of a capture, as a comparison names it."""
    if isinstance(source, Capture):
        return str(source.folder)
    if is_remote(str(source)):
        return str(source)
    return str(Path(source).resolve())


def _local_folders(sources: Sequence[Capture | str | Path]) -> list[Path]:
    """Return the folders of captures on this host, without archives and URLs."""
    folders = []
    for source in sources:
        if isinstance(source, Capture):
            folders.append(source.folder)
        elif not travels(str(source)):
            folders.append(Path(source))
    return folders


class _ListedCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case in `suite.json`, which also lists cases that have no capture; its other fields are not read."""

    name: str
    error: str | None = None


class _SuiteFile(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `suite.json` that is read here."""

    cases: tuple[_ListedCase, ...]


def are_suites(given: Sequence[str | Path]) -> bool:
    """Tell whether folders of suites are given, or single captures.

    Raises
    ------
    UsageError
        Both are given.
    """
    suites = [path for path in given if _is_suite(path)]
    singles = [str(path) for path in given if not _is_suite(path)]
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
    folders = [Path(path) for path in given]
    cases = _case_names(folders)
    entry = past.suite_entry()
    with suite_output(out, replace=replace, reads=folders) as target:
        # without --out, no report is written into the scratch folder
        kept = None if out is None else target
        results = [_compare_case(place, name, folders, kept, past, groups, entry) for place, name in cases.items()]
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
    """Compare one case, and write its report.

    Parameters
    ----------
    place : str
        Folder of the case, relative to that of each suite.
    name : str or None
        Name of the case; None where no suite lists it, so that its capture has to tell.
    target : Path or None
        Folder of the suite's report; None writes none.
    entry : PastOfSuite or None
        The entry of a history to which the case is added.
    """
    with_capture = [folder for folder in folders if holds_capture(folder / place)]
    without_capture = [str(folder) for folder in folders if folder not in with_capture]
    try:
        if len(with_capture) < min(2, len(folders)):
            raise _not_comparable(place, with_capture, folders)
        captures, comparison = compare_read([folder / place for folder in with_capture], groups)
    except ConsistencyError as error:
        return CaseResult.of_error(name or Path(place).name, place, error)
    # where no suite lists the case, its capture knows the name
    name = name or comparison.case
    comparison = held_against(past, entry, name, captures, comparison)
    if without_capture:
        unchecked = f"case {name} in {some(without_capture)}, without a capture of it"
        comparison = msgspec.structs.replace(comparison, not_checked=(*comparison.not_checked, unchecked))
    if target is not None:
        (target / place).mkdir(parents=True, exist_ok=True)
        comparison = report_folder.write_reports(with_provenance(comparison), target / place)
    return summarize(name, place, comparison, slowest_s(comparison))


def _not_comparable(place: str, with_capture: Sequence[Path], folders: Sequence[Path]) -> CaptureError:
    """Return the error of a case that is not compared, with the reasons that its suites list."""
    listed = {folder: _listed_cases(folder).get(place) for folder in folders if folder not in with_capture}
    reasons = [f"{folder}: {_why_no_capture(case)}" for folder, case in listed.items()]
    if not with_capture:
        return CaptureError("no folder has a capture of this case", where=place, got="; ".join(reasons))
    return CaptureError(
        f"only {with_capture[0]} has a capture of this case",
        where=place,
        got="; ".join(reasons),
        wanted="a capture of it in two folders",
    )


def _why_no_capture(case: _ListedCase | None) -> str:
    if case is None:
        return "no such case"
    if case.error is None:
        return "no capture"
    return one_line(case.error.partition("\n")[0])


def _case_names(folders: Sequence[Path]) -> dict[str, str | None]:
    """Return the names of the cases of all suites, by their folders relative to the suite.

    Cases of the first suite come first, in its order. A name is None where no suite lists the case: its capture knows
    the name.
    """
    names: dict[str, str | None] = {}
    for folder in folders:
        names |= {place: names.get(place) or case.name for place, case in _listed_cases(folder).items()}
        for case_folder in sorted((folder / CASES).glob("*")):
            if holds_capture(case_folder):
                names.setdefault(f"{CASES}/{case_folder.name}", None)
    return names


def _listed_cases(folder: Path) -> dict[str, _ListedCase]:
    """Return the cases that a suite lists, by folder; a file from elsewhere must not name any other path."""
    path = folder / SUITE
    try:
        cases = msgspec.json.decode(read_regular(path, folder), type=_SuiteFile).cases
    except FileNotFoundError:
        return {}  # a folder of captures alone has no such file
    except OSError as error:
        raise CaptureError("cannot read", where=path, got=error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CaptureError(f"{path.name} is damaged", where=path, got=error) from None
    return {f"{CASES}/{folder_name(case.name)}": case for case in cases}


def _is_suite(path: str | Path) -> bool:
    """Return whether a path is the folder of a suite."""
    if isinstance(path, str) and travels(path):
        return False  # a suite is no archive, and at no URL
    folder = Path(path)
    if holds_capture(folder):
        return False
    return (folder / CASES).is_dir() or (folder / SUITE).exists()
