"""Make and find the folders of runs by date below one `--out`, so that the same command line serves every night.

::

    OUT/2026-11-22T02-00-00Z/    what a run leaves; the time is UTC
    OUT/latest                   link to the last run that ended

Monitoring reads these, so this module needs nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from consistency.capture.claim import CLAIM, PARTIAL, is_abandoned
from consistency.errors import CaptureError, ConsistencyError

LATEST = "latest"
REPORT, SUITE = "report.json", "suite.json"
REFUSED = "refused.txt"
RUN_STATUS, SUITE_STATUS = "status.json", "suite-status.json"

_FORM = "%Y-%m-%dT%H-%M-%SZ"
"""ISO 8601, with a hyphen for each colon, which other systems refuse in a name."""

_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d+)?")


@contextmanager
def dated(out: Path) -> Iterator[Path]:
    """Yield a new folder below `out` with the time as its name; `latest` leads to it when the work is done.

    The folder of failed work is removed, unless a case of a suite has left its report there; so is, by a later
    run, that of a run which was killed.
    """
    folder = _new_folder(out)
    _remove_killed(out)
    try:
        yield folder
    except BaseException:
        if not _has_results(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    link = out / f".{LATEST}-{folder.name}"
    with suppress(OSError):  # where there are no links, the newest name is the latest
        link.symlink_to(folder.name)
        os.replace(link, out / LATEST)


@contextmanager
def telling_refusal(out: Path | None) -> Iterator[None]:
    """Leave a refused run's reason beside earlier results, for `status`, until a run has a result."""
    try:
        yield
    except ConsistencyError as error:
        if out is not None and _ended(latest_run(out)) is not None:
            with suppress(OSError):
                (out / REFUSED).write_text(str(error).splitlines()[0], encoding="utf-8")
        raise
    if out is not None:
        (out / REFUSED).unlink(missing_ok=True)


def _has_results(folder: Path) -> bool:
    return any(folder.glob(f"cases/*/{REPORT}"))


def _remove_killed(out: Path) -> None:
    """Remove the unfinished work of runs of this host whose processes are gone."""
    for folder in out.iterdir():
        if not _NAME.fullmatch(folder.name) or not is_abandoned(folder):
            continue
        if not _has_results(folder) and not (folder / "captures").exists():
            shutil.rmtree(folder, ignore_errors=True)
            continue
        # Results and captures stay: only unfinished captures and the claims of dead processes go.
        for partial in (*folder.glob(f".*{PARTIAL}"), *folder.glob(f"cases/*/.*{PARTIAL}")):
            shutil.rmtree(partial, ignore_errors=True)
        for claim in (*folder.glob(f".*{CLAIM}"), *folder.glob(f"cases/*/.*{CLAIM}"), folder / CLAIM):
            claim.unlink(missing_ok=True)


def latest_run(out: Path) -> Path:
    """Return the folder of the last run at `out`: itself, or one by date below it; `out` where there is none."""
    candidates = [out, _latest_dated(out)]
    ended = [folder for folder in candidates if folder is not None and _ended(folder) is not None]
    return max(ended, key=lambda folder: _ended(folder) or 0, default=out)


def _new_folder(out: Path) -> Path:
    """Make a folder below `out` with the time as its name, and a number where there is one of that name."""
    name = time.strftime(_FORM, time.gmtime())
    try:
        out.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):  # many hosts may start in the same second, by the same timer
            folder = out / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise CaptureError("cannot make the output folder", where=out, got=error) from None
    raise CaptureError("no name is left for the output folder", where=out / name)


def _latest_dated(out: Path) -> Path | None:
    """Return the newest folder by date below `out` that has a report; None where there is none."""
    with suppress(OSError):  # without links, the names are looked through
        folder = out / (out / LATEST).readlink()
        if _ended(folder) is not None:
            return folder
    try:
        folders = sorted((folder for folder in out.iterdir() if _NAME.fullmatch(folder.name)), reverse=True)
    except OSError:
        return None
    return next((folder for folder in folders if _ended(folder) is not None), None)


def _ended(folder: Path) -> int | None:
    """Return the time at which a run wrote its report, in nanoseconds; None where it wrote none."""
    times = []
    for name in (REPORT, SUITE):
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime_ns)
    return max(times, default=None)
