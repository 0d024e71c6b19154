"""Compare what was made apart: captures from hosts and days, and weight files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from consistency.capture.claim import scratch_folder
from consistency.capture.folder import Capture
from consistency.capture.reader import read_capture
from consistency.capture.transport import is_remote, travels
from consistency.case.engine_file import EngineFile
from consistency.comparison.result import Comparison, with_provenance
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.comparison.weight_files.diff import diff
from consistency.launch.engine import Watcher
from consistency.workflows import pipeline
from consistency.workflows.engines import case_of_engines, engines_alone, on_the_cpu
from consistency.workflows.judging import NO_PAST, Past, compare_captures, read_captures
from consistency.workflows.report_folder import output, refuse_among_weights, write_reports


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


def diff_weights(
    actual: Path, expected: Path, out: Path | None, *, allow_pickle: bool = False, replace: bool = False
) -> Comparison:
    """Compare two weight files or folders; write the report to `out`."""
    if out is not None:
        refuse_among_weights(out, actual, expected)
    with output(out, replace=replace):  # refused before any work
        started = time.monotonic()
        comparison = diff(actual, expected, allow_pickle=allow_pickle)
        comparison = with_provenance(comparison, time.monotonic() - started)
        return write_reports(comparison, out)


def _compared(
    captures: Sequence[Capture],
    unread: Sequence[str],
    given: Sequence[Capture | str | Path],
    groups: SiteGroups,
) -> Comparison:
    comparison = compare_captures(captures, unread=unread, groups=groups)
    return msgspec.structs.replace(comparison, captures=tuple(map(_place, given)))


def _engines(first: Capture, files: Sequence[EngineFile], scratch: Path, watch: Watcher) -> Capture:
    """Judge the outputs of inference engines for the case of a capture; its float64 reference is computed again."""
    plan = pipeline.plan_of(case_of_engines(first, files), on_the_cpu())
    target = scratch / "engines"
    pipeline.capture(plan, target, watch=watch)
    return engines_alone(read_capture(target))


def _place(one: Capture | str | Path) -> str:
    if isinstance(one, Capture):
        return str(one.folder)
    return str(one) if is_remote(str(one)) else str(Path(one).resolve())


def _is_local(one: Capture | str | Path) -> bool:
    return isinstance(one, Capture) or not travels(str(one))
