"""Record the origin of a capture or a report: time, host and command.

Every command starts with this module, so what takes long to import is imported where it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from consistency.text import without_credentials

_GIVEN: ContextVar[tuple[str, ...]] = ContextVar("command", default=())


@contextmanager
def running(command: Sequence[str]) -> Iterator[None]:
    """Record this command line in captures and reports that are made meanwhile, in place of the process's own."""
    token = _GIVEN.set(tuple(command))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def command() -> tuple[str, ...]:
    """Return the command line, word by word: the one that is `running`, else that of this process.

    URLs in it are without user, password and query.
    """
    return tuple(map(without_credentials, _words()))


def _words() -> tuple[str, ...]:
    """Return the command line as a user would type it, with credentials."""
    given = _GIVEN.get()
    if given:
        return given
    words = [word for word in sys.argv if word]
    if not words or words[0] in ("-", "-c"):  # interactive, or code without a file
        return ("python",)
    program = Path(words[0])
    if program.name == "__main__.py":
        return ("python", "-m", program.parent.name, *words[1:])
    if program.suffix == ".py":
        return ("python", *words)
    return (program.name, *words[1:])


def now() -> str:
    """Return the time: ISO 8601 in UTC, to the second."""
    import datetime

    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def host() -> str:
    """Return the name of this host."""
    import platform

    return platform.node()
