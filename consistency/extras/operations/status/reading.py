"""Find the last result, and read it in milliseconds.

`report.json` of a large model takes seconds. It is read only where it is newer than the small file beside it, or there
is none, and only then is what makes a status of it imported.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from consistency.capture.bounded import read_regular
from consistency.capture.json_codec import decode_json
from consistency.errors import UsageError
from consistency.extras.operations.status.record import SCHEMA, Status
from consistency.report.runs import REFUSED, REPORT, RUN_STATUS, SUITE, SUITE_STATUS, latest_run

_STATUS_OF_REPORT = {REPORT: RUN_STATUS, SUITE: SUITE_STATUS}


def read_status(path: Path) -> Status:
    """Read the last result at a path: a report, its folder, or the folder of dated runs.

    Raises
    ------
    UsageError
        There is no result, or it cannot be read.
    """
    root = path if path.is_dir() else None
    folder = path.parent if root is None else latest_run(path)
    if root is not None and (root / REFUSED).exists():
        raise UsageError(f"the last run has no result: {read_regular(root / REFUSED, root).decode(errors='replace')}")
    reports = [folder / name for name in _STATUS_OF_REPORT if (folder / name).exists()]
    if not reports:
        raise UsageError(f"no result at {path}", wanted=f"the --out folder of a run, or {REPORT}")
    report = max(reports, key=_written_ns)
    status_file = report.with_name(_STATUS_OF_REPORT[report.name])
    # an older status is of an earlier run: the last one was killed between report and status
    if status_file.exists() and _written_ns(status_file) >= _written_ns(report):
        with suppress(OSError, ValueError, RecursionError, msgspec.DecodeError):  # the report says the same
            status = decode_json(read_regular(status_file, root), Status)
            if status.schema == SCHEMA:
                return status
    from consistency.extras.operations.status import make

    try:
        return make.of_file(report, root)
    except OSError as error:
        raise UsageError(f"cannot read {report}", got=error) from None
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"not a report: {report}", got=error) from None


def _written_ns(path: Path) -> int:
    return path.stat().st_mtime_ns
