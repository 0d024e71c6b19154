"""A status in one line, as Nagios and a shell expect it, and the exit status beside it.

Health checkers cut a message at 80 bytes, so a line has no more, and each character is one byte. Names of cases,
devices and tensors may be a stranger's: what is not printable ASCII is escaped or replaced.
"""

from __future__ import annotations

import math

from consistency.case.duration import duration_text
from consistency.report.status.record import CLOCK_SKEW_S, Status
from consistency.text import one_line

MOST_BYTES = 80

_MOST_HEAD = 46  # the verdict and both marks, with a name of five letters; a longer one is cut

NO_RESULT = 2
"""Exit status where there is no result to read: bad input."""

STALE = 3
"""Exit status of a result that is too old: like that of a run of which a part was not checked."""

NAGIOS = {"OK": 0, "WARNING": 1, "CRITICAL": 2, "UNKNOWN": 3}
"""Monitoring Plugins Development Guidelines, 2.2: https://www.monitoring-plugins.org/doc/guidelines.html"""

_PLAIN = str.maketrans({"·": "-", "×": "x", "≤": "<=", "…": "...", "→": "->", "–": "-", "✗": "x"})
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def state(status: Status, *, stale: bool) -> str:
    """Return Nagios' word for a result.

    A lost worker is CRITICAL: its device may be dead. UNKNOWN is what says nothing of the devices: no result, a stale
    one, or a suite of which no case could be worse than unusable.
    """
    if stale or status.verdict == "unchecked":
        return "UNKNOWN"
    if status.verdict != "consistent":
        return "CRITICAL"
    return "WARNING" if status.findings.get("warning") else "OK"


def is_stale(age_s: float, max_age_s: float | None) -> bool:
    """Return whether a result is older than allowed, or from the future."""
    return max_age_s is not None and not -CLOCK_SKEW_S <= age_s <= max_age_s


def text_line(status: Status, age_s: float, max_age_s: float | None) -> str:
    """Return the line for people."""
    word = "STALE" if is_stale(age_s, max_age_s) else status.verdict.upper()
    head = _cut(_ascii(" ".join([word, *(f"[{mark}]" for mark in status.marks), status.case])), _MOST_HEAD)
    return _line(f"{head}: ", _what(status, age_s, max_age_s), f" ({_ago(age_s)})")


def nagios_line(status: Status, age_s: float, max_age_s: float | None) -> str:
    """Return the line for Nagios and what descends from it; performance data is in it as far as it fits."""
    word = state(status, stale=is_stale(age_s, max_age_s))
    ratio = [f"ratio={_perf(status.ratio)};;1"] if status.ratio is not None else []
    needed = "".join(f" | {one}" for one in ratio) if word == "OK" else ""
    marks = "".join(f"[{mark}] " for mark in status.marks)
    line = _line(f"CONSISTENCY {word} - {marks}", _what(status, age_s, max_age_s).replace("|", "/"), needed)
    separator = " " if needed else " | "
    for one in [*(ratio if not needed else []), f"age={max(age_s, 0):.0f}s", f"findings={sum_of(status)}"]:
        if len(line) + len(separator) + len(one) <= MOST_BYTES:
            line, separator = f"{line}{separator}{one}", " "
    return line


def no_result_line(message: str, form: str) -> str:
    """Return the line where there is no result."""
    if form == "nagios":
        return _line("CONSISTENCY UNKNOWN - ", message.replace("|", "/"), "")
    return _line("UNKNOWN ", message, "")


def sum_of(status: Status) -> int:
    """Return how many findings are no notes."""
    return sum(count for severity, count in status.findings.items() if severity != "note")


def _what(status: Status, age_s: float, max_age_s: float | None) -> str:
    if is_stale(age_s, max_age_s):
        assert max_age_s is not None
        if age_s < 0:
            return f"{status.verdict}, but dated in the future: check the clock"
        return f"{status.verdict}, but older than {duration_text(max_age_s)}"
    is_good = status.verdict == "consistent" and not status.findings.get("warning")
    return status.sentence if is_good or not status.reason else status.reason


def _line(head: str, text: str, tail: str) -> str:
    """Return a line of at most `MOST_BYTES`; head and tail are kept, and the text between them is cut."""
    return head + _cut(_ascii(text), MOST_BYTES - len(head) - len(tail)) + tail


def _cut(text: str, room: int) -> str:
    """Cut a text, where possible behind a clause."""
    if len(text) <= room:
        return text
    kept = text[: room - 3]
    clause = max(kept.rfind("; "), kept.rfind(" - "))
    return (kept[:clause] if clause > room // 2 else kept.rstrip()) + "..."


def _ascii(text: str) -> str:
    return one_line(text.translate(_PLAIN)).encode("ascii", "replace").decode()


def _ago(age_s: float) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if age_s >= size), _UNITS[-1])
    return f"{max(age_s, 0) // size:.0f}{unit} ago"


def _perf(value: float) -> str:
    """Return a value of performance data; `U` is what the guidelines (2.6) have for one that is no number."""
    return f"{value:.3g}" if math.isfinite(value) else "U"
