"""The folder that a command writes: made, refused or removed as a whole; the report in it, written and read."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from consistency.capture.archive import read_member
from consistency.capture.bounded import read_regular
from consistency.capture.claim import CLAIM, claimed, scratch_folder
from consistency.capture.folder import CASES, MANIFEST
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.reader import brief
from consistency.capture.transport import ARCHIVE
from consistency.capture.whole_file import WholeFile, remove_leftovers
from consistency.capture.wording import some
from consistency.case.case import Case
from consistency.comparison.result import Comparison, with_unwritten
from consistency.comparison.suite import SuiteResult
from consistency.errors import CaptureError, UsageError
from consistency.report.formats import Chosen, Format, View, formats
from consistency.report.json import SCHEMA, named, read, with_names
from consistency.report.redaction import Redaction, redaction_of
from consistency.report.runs import REPORT, SUITE, latest_run
from consistency.report.summary import all_rows

CAPTURES = "captures"


def write_reports(comparison: Comparison, out: Path | None) -> Comparison:
    """Write the files of a report to a folder; return the comparison with the names of files that cannot be written.

    Such a file raises nothing: the work of hours is not lost for want of room.
    """
    if out is None:
        return comparison
    view = View(elapsed_s=comparison.elapsed_s, folder=str(out), rows=all_rows(comparison))
    return with_unwritten(comparison, write_all(out, formats(Chosen.OUT), comparison, view))


def write_all(out: Path, rows: Iterable[Format], found: Comparison | SuiteResult, view: View) -> list[str]:
    """Write a result in several formats; return a text for each file that cannot be written.

    All are written before the first appears, so that whoever reads them, or ends this process, finds files that agree.
    """
    unwritten: dict[str, str] = {}
    written: list[WholeFile] = []
    with ExitStack() as stack:
        for file_format in rows:
            try:
                file = stack.enter_context(WholeFile(out / file_format.name))
                written.append(file)
                file.write(file_format.render(found, view))
            except CaptureError as error:
                unwritten[file_format.name] = brief(error)
        # all that can be written are complete: only now they appear
        complete = [file for file in written if file.path.name not in unwritten]
        for file in complete:
            try:
                file.commit()
            except CaptureError as error:
                unwritten[file.path.name] = brief(error)
    if any(file.path.name not in unwritten for file in complete):
        _remove(out, unwritten)  # files of an earlier run say something else than those that are new
    return [f"{name}: {reason}" for name, reason in unwritten.items()]


def remove_reports(out: Path, *, of_suite: bool = False) -> None:
    """Remove the report of an earlier run whose captures are replaced: it says nothing of the new ones."""
    _remove(out, [row.name for row in formats(Chosen.OUT, of_suite=of_suite)])


def _remove(out: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):  # a folder may have that name: writing the file says so
            (out / name).unlink()


@contextmanager
def output(
    out: Path | None,
    *,
    replace: bool,
    reads: Sequence[Path] = (),
    writes: Sequence[str] | None = None,
    keeps: Callable[[Path], bool] = lambda _: False,
) -> Iterator[Path]:
    """Yield the folder to write into, claimed; a folder that was made here is removed where the work fails.

    Parameters
    ----------
    out : Path or None
        The folder; None yields a scratch folder, which is removed afterwards.
    reads : sequence of Path
        Folders that are read, and so cannot be written.
    writes : sequence of str, optional
        Names of the files and folders that will be in it, and must not be there yet unless `replace`; by default those
        that a run writes.
    keeps : callable
        Reports whether the folder of failed work holds something worth keeping.

    Raises
    ------
    CaptureError
        The folder cannot be made or claimed, is read, or has an earlier run's results.
    """
    if out is None:
        with scratch_folder("run") as scratch:
            yield scratch
        return
    _refuse_unwritable(out, reads)
    if writes is None:
        writes = (*(row.name for row in formats(Chosen.OUT)), CAPTURES)
    # before anything is made or claimed: a refusal leaves everything as it was
    _refuse_earlier(out, writes, replace=replace)
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError("cannot make the output folder", where=out, got=error) from None
    with claimed(out / CLAIM):
        _refuse_earlier(out, writes, replace=replace)  # another run may have ended since
        remove_leftovers(out)
        try:
            yield out
        except BaseException:  # Ctrl-C is one
            if not existed and not keeps(out):
                with suppress(OSError):
                    shutil.rmtree(out)
            raise


def _refuse_unwritable(out: Path, reads: Sequence[Path]) -> None:
    """Raise an error where a path cannot be a folder for results: a file, an archive, or a folder that is read."""
    refuse_archive(out)
    if out.exists() and not out.is_dir():
        raise CaptureError("--out must be a folder", where=out, got="a file")
    if out.resolve() in [folder.resolve() for folder in reads]:
        raise CaptureError("--out is one of the folders that are compared", where=out, hint="choose another folder")


def refuse_among_weights(out: Path, *folders: str | Path) -> None:
    """Raise UsageError where a folder for results is the folder of a base or an adapter, or inside it."""
    target = out.resolve()
    for folder in folders:
        if Path(folder).is_dir() and target.is_relative_to(Path(folder).resolve()):
            raise UsageError(
                "--out is inside a folder of weights", where=out, got=folder, hint="choose a folder that is in none"
            )


def folders_of(case: Case) -> list[str]:
    """Return the folders of the base and the adapters of a case."""
    folders = (case.base, case.adapter, *(adapter.path for adapter in case.adapters))
    return [folder for folder in folders if folder]


def refuse_archive(out: Path) -> None:
    """Raise UsageError where the name of a folder for results says that it is one file."""
    if out.name.endswith(ARCHIVE):
        raise UsageError(
            "this command writes a folder, not one file", where=out, hint=f"leave {ARCHIVE} out, and pack the folder"
        )


def _refuse_earlier(out: Path, names: Sequence[str], *, replace: bool) -> None:
    """Raise CaptureError where an earlier run has left one of these names, unless they are to be replaced."""
    present = [name for name in names if (out / name).exists()]
    if present and not replace:
        raise CaptureError(
            "an earlier run's results are in the way",
            where=out,
            got=", ".join(present),
            hint="choose another --out, or give --force to replace them",
        )


_MOST_FOLDERS = 8  # folders that an error names, where the reports are further below


D = TypeVar("D")


def read_comparison(path: Path) -> tuple[Comparison, Path]:
    """Read a report, given as its file, its folder, or the folder of dated runs; return it and its folder.

    Raises
    ------
    UsageError
        There is no report, or its schema is not supported.
    """
    content, file = _read_content(path)
    _check_schema(content, file)
    return _try(lambda: read(content), file), file.parent


def read_suite(path: Path) -> tuple[SuiteResult, Path] | None:
    """Return the suite of a folder, or of the folder of dated runs, and its folder; None where there is none."""
    file = path
    if path.is_dir():
        file = latest_run(path) / SUITE
    if file.name != SUITE or (file.parent / REPORT).exists() or not file.exists():
        return None
    return _decode(_read_bytes(file, path), SuiteResult, file), file.parent


def read_redacted(path: Path) -> tuple[Comparison, Redaction]:
    """Read a report without the names of people and machines; return it with the redaction that took them out."""
    content, file = _read_content(path)
    _check_schema(content, file)
    table = _decode(content, dict[str, Any], file)
    redactions: list[Redaction] = []

    def redact(plain: dict[str, Any]) -> dict[str, Any]:
        redaction = redaction_of(plain)
        redactions.append(redaction)
        changed: dict[str, Any] = redaction.value(plain)
        return changed

    table = _try(lambda: with_names(table, redact), file)
    return _try(lambda: read(encode_json(table)), file), redactions[0]


def redaction_for(path: Path, texts: Iterable[str]) -> Redaction:
    """Return the redaction that takes the names of people and machines out of a report and out of texts made of it."""
    content, file = _read_content(path)
    _check_schema(content, file)
    table = _decode(content, dict[str, Any], file)
    return redaction_of(_try(lambda: named(table), file), more=texts)


def _read_content(path: Path) -> tuple[bytes, Path]:
    """Return the bytes of a report and its file: the archive, where the report is in one."""
    if path.is_file() and path.name.endswith(ARCHIVE):
        return read_member(path, REPORT), path
    file = path
    if path.is_dir():
        file = latest_run(path) / REPORT
    if file.exists():
        return _read_bytes(file, path), file
    wanted = f"{REPORT}, or the --out folder of a run"
    raise UsageError("no report here", where=path, wanted=wanted, hint=_hint_at_report(path, file))


def _hint_at_report(path: Path, file: Path) -> str | None:
    """Return a hint at the suite, reports or capture that a path has in the place of a report; None without these.

    `file` is where the report should be.
    """
    if (file.parent / SUITE).exists():
        return f"this is a suite: give the folder of a case, {file.parent / CASES / 'NAME'}"
    below = sorted(str(report.parent) for report in path.glob(f"*/{REPORT}"))
    if below:
        return f"there are reports in {some(below, _MOST_FOLDERS)}"
    if any((path / name).exists() for name in (MANIFEST, f"captures/{MANIFEST}")):
        return f"this is a capture: consistency compare {shlex.quote(str(path))} makes its report"
    return None


def _read_bytes(file: Path, path: Path) -> bytes:
    """Read a file at a path that a user has named; one in a folder must not lead out of it."""
    folder = path if path.is_dir() else None
    try:
        return read_regular(file, folder)
    except OSError as error:
        raise UsageError("cannot read the report", where=file, got=error) from None


def _decode(content: bytes, kind: type[D], file: Path) -> D:
    return _try(lambda: decode_json(content, kind), file)


def _try(attempt: Callable[[], D], file: Path) -> D:
    """Return what an attempt to decode returns; raise UsageError where the file is no report."""
    try:
        return attempt()
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError("not a report", where=file, got=error) from None


def _check_schema(content: bytes, file: Path) -> None:
    """Raise UsageError where a report has another schema."""
    schema = _decode(content, _Schema, file).schema
    if schema != SCHEMA:
        raise UsageError("unsupported report schema", where=file, got=schema, wanted=SCHEMA)


class _Schema(msgspec.Struct, frozen=True):
    schema: str
