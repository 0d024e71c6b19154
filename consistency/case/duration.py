"""A time that a user gives: `90s`, `10m`, `2h`, `1h30m`, `2d`, or a number of seconds."""

from __future__ import annotations

import re

from consistency.errors import UsageError

_FORM = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SECONDS = (86400, 3600, 60, 1)


def parse_duration(given: object, *, where: str) -> float:
    """Return a time in seconds.

    Raises
    ------
    UsageError
        It is no time, or not above zero.
    """
    text = str(given).strip()
    found = None if isinstance(given, bool) else _FORM.fullmatch(text)
    parts = () if found is None else found.groups()
    seconds = sum(float(part) * unit for part, unit in zip(parts, _SECONDS, strict=False) if part)
    if not seconds > 0:
        raise UsageError(
            "not a time", where=where, got=text, wanted="90s, 10m, 2h, 1h30m, or a number of seconds above 0"
        )
    return seconds


def duration_text(seconds: float) -> str:
    """Write a time as `parse_duration` reads it, in whole seconds from ten seconds on."""
    if seconds < 10:
        return f"{seconds:.3g}s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    parts = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count)
