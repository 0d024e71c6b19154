"""Read and write a time that a user gives: `90s`, `10m`, `2h`, `1h30m`, `2d`, or a number of seconds."""

from __future__ import annotations

import re

from consistency.errors import UsageError

_FORM = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SECONDS = (86400, 3600, 60, 1)  # of the units d, h, m and s


def parse_duration(given: object, *, where: str) -> float:
    """Return a time in seconds.

    Raises
    ------
    UsageError
        It is no time, or not above zero.
    """
    text = str(given).strip()
    match = None if isinstance(given, bool) else _FORM.fullmatch(text)
    numbers = () if match is None else match.groups()
    seconds = sum(float(number) * unit for number, unit in zip(numbers, _SECONDS, strict=False) if number)
    if not seconds > 0:
        raise UsageError(
            "not a time", where=where, got=text, wanted="90s, 10m, 2h, 1h30m, or a number of seconds above 0"
        )
    return seconds


def duration_text(seconds: float) -> str:
    """Write a time as `parse_duration` reads it, in whole seconds from ten seconds on."""
    if seconds < 10:
        return f"{seconds:.3g}s"
    hours, remainder = divmod(round(seconds), 3600)
    minutes, remainder = divmod(remainder, 60)
    return "".join(f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (remainder, "s")) if count)
