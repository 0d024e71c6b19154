"""A run that did not end: whoever needs its result fails at once, and starts no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.whole_file import write_whole
from consistency.errors import ConsistencyError, first_line
from consistency.text import clean


@contextmanager
def leaving_its_error(path: Path) -> Iterator[None]:
    """Write why the run inside ended without a result, whatever ended it, for `raise_error`."""
    try:
        yield
    except BaseException as error:
        write_whole(path, [encode_json(_in_words(error).parts)])
        raise


def raise_error(path: Path) -> None:
    """Raise the error that a run has left, if there is one."""
    if path.exists():
        raise ConsistencyError(**decode_json(path.read_bytes(), dict[str, Any]))


@contextmanager
def without_stack() -> Iterator[None]:
    """Turn an error of the set-up into a failure with its text alone.

    Such are an input that cannot be used, a worker that was lost, and the time limit that another plugin has set.
    """
    try:
        yield
    except (ConsistencyError, pytest.fail.Exception) as error:
        raise pytest.fail.Exception(clean(str(error)), pytrace=False) from None


def _in_words(error: BaseException) -> ConsistencyError:
    if isinstance(error, ConsistencyError):
        return error
    return ConsistencyError(
        "the run was stopped, and is not started again for other items",
        got=first_line(error),
        hint="the first item runs the devices for all: a time limit per item must allow for that, or count the test "
        "alone (timeout_func_only of pytest-timeout); --consistency-timeout limits each worker",
    )
