"""The folder that a command writes: made, refused or removed as a whole, and the files of a report in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from consistency.capture.claim import CLAIM, claimed, scratch_folder
from consistency.capture.reader import brief
from consistency.capture.transport import ARCHIVE
from consistency.capture.whole_file import WholeFile, remove_leftovers
from consistency.case.case import Case
from consistency.comparison.result import Comparison, with_unwritten
from consistency.comparison.suite import SuiteResult
from consistency.errors import CaptureError, UsageError
from consistency.report.formats import Chosen, Format, Subject, View, formats
from consistency.report.summary import all_groups

CAPTURES = "captures"


def write_reports(comparison: Comparison, out: Path | None) -> Comparison:
    """Write the files of a report to a folder; return the comparison with what cannot be written.

    The work of hours is not lost for want of room.
    """
    if out is None:
        return comparison
    view = View(elapsed_s=comparison.elapsed_s, folder=str(out), groups=all_groups(comparison))
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


def remove_reports(out: Path, subject: Subject = Subject.RUN) -> None:
    """Remove the report of an earlier run whose captures are replaced: it says nothing of the new ones."""
    _remove(out, [row.name for row in formats(Chosen.OUT, subject)])


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
