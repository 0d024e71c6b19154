"""The standard streams of a command, where they lead to a file on a disk that is full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from consistency.errors import UnwrittenOutputError


class LossyStream:
    """A stream of messages that loses what cannot be written, but for a closed pipe, which ends the command."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or lose it."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or keep it for the next time."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            return


@contextmanager
def stating_verdict(verdict: str, exit_status: int) -> Iterator[None]:
    """Print a result to stdout in this context: where that cannot be written, the error states the verdict.

    Raises
    ------
    UnwrittenOutputError
        It has the verdict and its exit status.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        what = f"the verdict is {verdict}, but the output cannot be written"
        raise UnwrittenOutputError(what, exit_status=exit_status, got=error) from None


def discard(*streams: TextIO) -> None:
    """Drop the rest in the buffers of streams: it must not fail once more when Python flushes them."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
