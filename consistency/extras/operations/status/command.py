"""`consistency status`: the last result, in milliseconds, for monitoring."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.errors import ConsistencyError

if TYPE_CHECKING:
    from consistency.extras.operations.status.record import Status

EXAMPLES = (
    ("the last result in one line", "consistency status ./runs"),
    ("for Nagios; UNKNOWN after 26 hours", "consistency status ./runs --format nagios --max-age 26h"),
    (
        "metrics for node_exporter's textfile collector",
        "consistency status ./runs --format prometheus --out /var/lib/node_exporter/consistency.prom",
    ),
)

FORMATS = {
    "text": "one line",
    "nagios": "one line with performance data, and exit status 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN",
    "prometheus": "metrics for node_exporter's textfile collector",
    "json": "status.json, with age_s, stale and state",
}
"""Formats of the output with their help."""


_EXIT_STATUSES = {
    0: "consistent",
    1: "inconsistent",
    2: "nothing was checked, no result, or bad usage",
    3: "incomplete, or stale",
}


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    about = "print the last result in one line or as metrics, for monitoring"
    parser = command("status", _status, about, EXAMPLES, statuses=_EXIT_STATUSES)
    parser.add_argument("report", type=Path, metavar="DIR", help="the --out folder of a run; of dated runs, the latest")
    parser.add_argument(
        "--format",
        choices=list(FORMATS),
        default="text",
        help="what is printed: " + "; ".join(f"{name}: {text}" for name, text in FORMATS.items()),
    )
    parser.add_argument("--max-age", metavar="TIME", help="treat an older result as stale, e.g. 90m, 26h, 2d")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to a file, whole or not at all")


def _status(parsed: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    from consistency.case.duration import parse_duration
    from consistency.extras.operations.status.reading import read_status

    try:
        max_age_s = None if parsed.max_age is None else parse_duration(parsed.max_age, where="--max-age")
        status = read_status(parsed.report)
    except ConsistencyError as error:
        if parsed.format == "prometheus":
            raise  # metrics of an earlier result stay, and their time says how old they are
        text, exit_status = _without_result(parsed.format, error)
    else:
        text, exit_status = _with_result(parsed.format, status, status.age_s(datetime.now(UTC)), max_age_s)
    _write(parsed, text)
    return exit_status


def _with_result(form: str, status: Status, age_s: float, max_age_s: float | None) -> tuple[str, int]:
    """Return a result in a format, and the exit status."""
    from consistency.extras.operations.status import printed

    is_stale = printed.is_stale(age_s, max_age_s)
    state = printed.state(status, stale=is_stale)
    if form == "nagios":
        return printed.nagios_line(status, age_s, max_age_s), printed.NAGIOS[state]
    exit_status = printed.STALE if is_stale else status.exit_status
    if form == "prometheus":
        stale = None if max_age_s is None else is_stale
        return "\n".join(printed.metrics(status, stale=stale)), exit_status
    if form == "json":
        import msgspec

        from consistency.capture.json_codec import encode_json

        table = {**msgspec.structs.asdict(status), "age_s": round(age_s, 3), "stale": is_stale, "state": state}
        return encode_json(table, indent=1).decode(), exit_status
    return printed.text_line(status, age_s, max_age_s), exit_status


def _without_result(form: str, error: ConsistencyError) -> tuple[str, int]:
    """Return in a format why there is no result, and the exit status."""
    from consistency.extras.operations.status.printed import NAGIOS, NO_RESULT, no_result_line

    if form == "json":
        from consistency.capture.json_codec import encode_json

        return encode_json({"state": "UNKNOWN", "error": error.parts}, indent=1).decode(), NO_RESULT
    message = ", wanted ".join(filter(None, [error.what, error.parts.get("wanted")]))
    # Nagios reads 2 as CRITICAL, but nothing is known of the devices
    exit_status = NAGIOS["UNKNOWN"] if form == "nagios" else NO_RESULT
    return no_result_line(message, form), exit_status


def _write(parsed: argparse.Namespace, text: str) -> None:
    """Write a text to the file that is asked for, or print it."""
    if parsed.out is None:
        print(text)
        return
    from consistency.capture.whole_file import write_whole

    write_whole(parsed.out, [f"{text}\n".encode()])
