"""The folder that a command writes: made, refused or removed as a whole; a report is written there, and read."""

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
    """Write the files of a report to a folder; return the comparison with what cannot be written.

    The work of hours is not lost for want of room.
    """
    if out is None:
        return comparison
    view = View(elapsed_s=comparison.elapsed_s, folder=str(out), rows=all_rows(comparison))
    return with_unwritten(comparison, write_all(out, formats(Chosen.OUT), comparison, view))


def write_all(out: Path, rows: Iterable[Format], found: Comparison | SuiteResult, view: View) -> list[str]:
    """Write as many files as can be written; return a text for each of the others.

    All are written before the first appears, so that whoever reads them, or ends this process, finds files that agree.
    """
    unwritten: dict[str, str] = {}
    written: list[WholeFile] = []
    with ExitStack() as stack:
        for row in rows:
            try:
                written.append(stack.enter_context(WholeFile(out / row.name)))
                written[-1].write(row.render(found, view))
            except CaptureError as error:
                unwritten[row.name] = brief(error)
        complete = [file for file in written if file.path.name not in unwritten]
        for file in complete:
            try:
                file.commit()
            except CaptureError as error:
                unwritten[file.path.name] = brief(error)
    if any(file.path.name not in unwritten for file in complete):
        _remove(out, unwritten)  # those of an earlier run say something else
    return [f"{name}: {text}" for name, text in unwritten.items()]


def remove_reports(out: Path, *, of_suite: bool = False) -> None:
    """Remove the report of an earlier run whose captures are replaced: it says nothing of the new ones."""
    _remove(out, [row.name for row in formats(Chosen.OUT, of_suite=of_suite)])


def _remove(out: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):  # of a folder in the way, the writing says so
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
    """Yield the folder to write into, claimed; one that was made here is removed where the work fails.

    Parameters
    ----------
    reads : sequence of Path
        Folders that are read, and so cannot be it.
    writes : sequence of str, optional
        What will be in it, and must not be there yet unless `replace`; by default what a run writes.
    keeps : callable
        Reports whether the folder of failed work holds something worth keeping.
    """
    if out is None:
        with scratch_folder("run") as scratch:
            yield scratch
        return
    refuse_archive(out)
    if out.exists() and not out.is_dir():
        raise CaptureError("--out must be a folder", where=out, got="a file")
    if out.resolve() in [folder.resolve() for folder in reads]:
        raise CaptureError("--out is one of the folders that are compared", where=out, hint="choose another folder")
    names = (*(row.name for row in formats(Chosen.OUT)), CAPTURES) if writes is None else writes
    _refuse_earlier(out, names, replace=replace)
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError("cannot make the output folder", where=out, got=error) from None
    with claimed(out / CLAIM):
        _refuse_earlier(out, names, replace=replace)  # of a run that ended since
        remove_leftovers(out)
        try:
            yield out
        except BaseException:
            if not existed and not keeps(out):
                with suppress(OSError):
                    shutil.rmtree(out)
            raise


def refuse_among_weights(out: Path, *folders: str | Path) -> None:
    """Raise UsageError where a folder for results is, or is inside, that of a base or an adapter."""
    place = out.resolve()
    for folder in folders:
        if Path(folder).is_dir() and place.is_relative_to(Path(folder).resolve()):
            raise UsageError(
                "--out is inside a folder of weights", where=out, got=folder, hint="choose a folder that is in none"
            )


def folders_of(case: Case) -> list[str]:
    """Return the base and the adapters of a case."""
    return [one for one in (case.base, case.adapter, *(one.path for one in case.adapters)) if one]


def refuse_archive(out: Path) -> None:
    """Raise UsageError where the name of a folder for results says that it is one file."""
    if out.name.endswith(ARCHIVE):
        raise UsageError(
            "this command writes a folder, not one file", where=out, hint=f"leave {ARCHIVE} out, and pack the folder"
        )


def _refuse_earlier(out: Path, names: Sequence[str], *, replace: bool) -> None:
    present = [name for name in names if (out / name).exists()]
    if present and not replace:
        raise CaptureError(
            "an earlier run's results are in the way",
            where=out,
            got=", ".join(present),
            hint="choose another --out, or give --force to replace them",
        )


_MOST_FOLDERS = 8  # named where there is no report, but below


D = TypeVar("D")


def read_comparison(path: Path) -> tuple[Comparison, Path]:
    """Read a report, given as its file, its folder, or the folder of dated runs; return it and its folder.

    Raises
    ------
    UsageError
        There is no report, or its schema is not supported.
    """
    content, file = _content(path)
    _check_schema(content, file)
    return _tried(lambda: read(content), file), file.parent


def read_suite(path: Path) -> tuple[SuiteResult, Path] | None:
    """Return the suite of a folder, or of the folder of dated runs, and its folder; None where there is none."""
    file = latest_run(path) / SUITE if path.is_dir() else path
    if file.name != SUITE or (file.parent / REPORT).exists() or not file.exists():
        return None
    return _decoded(_bytes(file, path), SuiteResult, file), file.parent


def read_redacted(path: Path) -> tuple[Comparison, Redaction]:
    """Read the comparison without what names people and machines, and return what took that out."""
    content, file = _content(path)
    _check_schema(content, file)
    table = _decoded(content, dict[str, Any], file)
    found: list[Redaction] = []

    def redacted(plain: dict[str, Any]) -> dict[str, Any]:
        found.append(redaction_of(plain))
        changed: dict[str, Any] = found[0].value(plain)
        return changed

    table = _tried(lambda: with_names(table, redacted), file)
    return _tried(lambda: read(encode_json(table)), file), found[0]


def redaction_for(path: Path, texts: Iterable[str]) -> Redaction:
    """Return what takes the names of people and machines out of a report, and of texts that were made of it."""
    content, file = _content(path)
    _check_schema(content, file)
    table = _decoded(content, dict[str, Any], file)
    return redaction_of(_tried(lambda: named(table), file), more=texts)


def _content(path: Path) -> tuple[bytes, Path]:
    if path.is_file() and path.name.endswith(ARCHIVE):
        return read_member(path, REPORT), path
    file = latest_run(path) / REPORT if path.is_dir() else path
    if file.exists():
        return _bytes(file, path), file
    hint = None
    if (file.parent / SUITE).exists():
        hint = f"this is a suite: give the folder of a case, {file.parent / CASES / 'NAME'}"
    elif below := sorted(str(one.parent) for one in path.glob(f"*/{REPORT}")):
        hint = f"there are reports in {some(below, _MOST_FOLDERS)}"
    elif any((path / name).exists() for name in (MANIFEST, f"captures/{MANIFEST}")):
        hint = f"this is a capture: consistency compare {shlex.quote(str(path))} makes its report"
    raise UsageError("no report here", where=path, wanted=f"{REPORT}, or the --out folder of a run", hint=hint)


def _bytes(file: Path, given: Path) -> bytes:
    try:
        return read_regular(file, given if given.is_dir() else None)
    except OSError as error:
        raise UsageError("cannot read the report", where=file, got=error) from None


def _decoded(content: bytes, kind: type[D], file: Path) -> D:
    return _tried(lambda: decode_json(content, kind), file)


def _tried(attempt: Callable[[], D], file: Path) -> D:
    try:
        return attempt()
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError("not a report", where=file, got=error) from None


def _check_schema(content: bytes, file: Path) -> None:
    """Raise UsageError where a report has another schema."""
    found = _decoded(content, _Schema, file).schema
    if found != SCHEMA:
        raise UsageError("unsupported report schema", where=file, got=found, wanted=SCHEMA)


class _Schema(msgspec.Struct, frozen=True):
    schema: str
