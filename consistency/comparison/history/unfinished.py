"""Runs without an entry in a history: a note of each is written before its work, and removed after its entry.

So a run that was killed, stopped, or ended by an error is not simply missing.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import PurePosixPath

import msgspec

from consistency.capture import origin
from consistency.capture.claim import CLAIM, claim_of, claimed, is_held, remove_abandoned
from consistency.capture.version import __version__
from consistency.comparison.history.records import SCHEMA, RunRecord
from consistency.comparison.history.store import STARTED, History
from consistency.errors import CaptureError, first_line

DID_NOT_END, RUNNING = "did not end", "running"
"""What is said of such a run in place of a verdict. Of one on another host's disk it is not known which."""

NO_ENTRY = "has not ended"


@contextmanager
def noted(history: History, case: str, *, report: str = "") -> Iterator[None]:
    """Note in a history that a run of a case has started; what ends it without an entry is added to that note.

    Raises
    ------
    CaptureError
        The history cannot be written: that is known before hours of work.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    note = RunRecord(
        schema=SCHEMA, at=now, host=origin.host(), case=case, verdict=NO_ENTRY, tool=__version__, report=report
    )
    place = history.put_run(STARTED, note)
    path = history.local(place)
    with ExitStack() as stack:
        if path is not None:
            stack.enter_context(claimed(claim_of(path)))
        try:
            yield
        except BaseException as error:
            reason = "stopped" if isinstance(error, KeyboardInterrupt) else first_line(error)
            ended = msgspec.structs.replace(note, verdict=DID_NOT_END, findings=(reason,))
            history.put_run(STARTED, ended, PurePosixPath(place).name)
            raise
        with suppress(CaptureError):  # the verdict is more than its note
            history.remove(place)


def remove_claims(history: History) -> None:
    """Remove what killed processes left of the claims of notes that are gone."""
    for place in history.files_of(STARTED):
        path = history.local(place)
        if path is not None and path.name.endswith(CLAIM):
            note = path.with_name(path.name.removeprefix(".").removesuffix(CLAIM))
            if not note.exists():
                remove_abandoned(path)


def unfinished(history: History) -> Iterator[tuple[str, RunRecord]]:
    """Yield the notes of runs without an entry with their paths, the latest first."""
    for place in sorted((name for name in history.files_of(STARTED) if name.endswith(".json")), reverse=True):
        path = history.local(place)
        held = None if path is None else is_held(claim_of(path))
        for note in history.runs([place]):
            known = {True: RUNNING, False: DID_NOT_END, None: note.verdict}[held]
            yield place, msgspec.structs.replace(note, verdict=known)
