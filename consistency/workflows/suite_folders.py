"""Compare the folders of several suites: case by case, each like single captures, with one report for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from consistency.capture import origin
from consistency.capture.bounded import read_regular
from consistency.capture.folder import CASES, holds_capture
from consistency.capture.transport import travels
from consistency.capture.wording import some
from consistency.case.suite import folder_name
from consistency.comparison.result import with_provenance
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.comparison.suite import CaseResult, SuiteResult
from consistency.errors import CaptureError, ConsistencyError, UsageError
from consistency.report.summarize import summarize
from consistency.text import one_line
from consistency.workflows import comparing, report_folder
from consistency.workflows.judging import NO_PAST, Past, resolved
from consistency.workflows.suite import slowest_s, suite_output, write_suite

if TYPE_CHECKING:
    from consistency.comparison.history.suite import SuiteEntry

_SUITE_FILE = "suite.json"


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
            "a suite cannot be compared with a single capture", got=some(singles), wanted="folders of suites only",
            hint=f"name the case of the suite: {suites[0]}/{CASES}/NAME",
        )  # fmt: skip
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
    results: list[CaseResult] = []
    entry = past.suite_entry()
    with suite_output(out, replace=replace, reads=folders) as target:
        for place, name in cases.items():
            result = _compare(place, name, folders, target, keep=out is not None, past=past, groups=groups, entry=entry)
            results.append(result)
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


def _compare(
    place: str,
    name: str | None,
    folders: Sequence[Path],
    target: Path,
    *,
    keep: bool,
    past: Past,
    groups: SiteGroups,
    entry: SuiteEntry | None,
) -> CaseResult:
    """Compare one case, and write its report; `place` is its folder in that of each suite."""
    having = [folder for folder in folders if holds_capture(folder / place)]
    lacking = [str(folder) for folder in folders if folder not in having]
    try:
        if len(having) < min(2, len(folders)):
            raise _not_comparable(place, having, folders)
        captures, comparison = comparing.compare_read([folder / place for folder in having], groups)
    except ConsistencyError as error:
        return CaseResult.of_error(name or Path(place).name, place, error)
    name = name or comparison.case
    comparison = past.accepted(comparison) if entry is None else entry.add(name, captures, comparison)
    if lacking:
        text = f"case {name} in {some(lacking)}, without a capture of it"
        comparison = msgspec.structs.replace(comparison, not_checked=(*comparison.not_checked, text))
    if keep:
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
    path = folder / _SUITE_FILE
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
    return not holds_capture(folder) and ((folder / CASES).is_dir() or (folder / _SUITE_FILE).exists())
