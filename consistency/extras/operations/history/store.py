"""A history: what each run saw of each device, in files that are never changed, so that a later run can detect drift.

::

    runs/<time>-<id>.json    one run: verdict, and what its workers recorded; written last, the commit mark
    tables/<sha256>.json       the digest of every tensor of a worker; runs with equal digests share one
    started/<time>-<id>.json   a run that has no entry yet (`noted`)

A history is a folder, on disk or at any URL that fsspec knows. A run is one file, which a disk renames into place and
an object store writes whole, so a reader sees all of it or nothing. Tables are named by their content and written
first. Each run writes them anew even where they exist: `retention.py` removes none that was just written.
"""

from __future__ import annotations

import datetime
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

import msgspec

from consistency.capture import origin
from consistency.capture.bounded import NotReadError, read_regular
from consistency.capture.claim import CLAIM, claim_of, claimed, is_held, remove_abandoned
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.transport import open_store, remote_errors
from consistency.capture.version import __version__
from consistency.capture.whole_file import remove_leftovers, write_whole
from consistency.errors import CaptureError, UsageError, first_line
from consistency.extras.operations.history.records import SCHEMA, RunRecord, Table

RUNS, TABLES, STARTED = "runs", "tables", "started"

_OF_FORMER_VERSIONS = "rosters"  # the folder that only their histories have
_WAIT_S = 600.0  # time to wait for another process that removes old runs: thousands take minutes
_MOST_FINDINGS = 64  # findings in a record: the report has all


class History:
    """A history to read and append to: a folder, or a URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = open_store(url, "cannot open the history")
        protocol = self._fs.protocol
        protocols = (protocol,) if isinstance(protocol, str) else protocol
        self._is_local = "file" in protocols
        self.damage: list[str] = []  # names of damaged runs that were met, with the reasons
        # runs that `earlier` has read, and the iterator of those after them
        self._read: list[RunRecord] = []
        self._unread: Iterator[RunRecord] | None = None
        with remote_errors("cannot read the history", url):
            is_old = self._fs.exists(f"{self._root}/{_OF_FORMER_VERSIONS}")
        if is_old:
            raise UsageError(f"the history at {url} was written by an earlier version: start another one")

    def names(self) -> list[str]:
        """Return the names of the runs, the latest first."""
        return sorted((name for name in self.files_of(RUNS) if name.endswith(".json")), reverse=True)

    def files_of(self, folder: str) -> list[str]:
        """Return the files in a folder of the history, with their paths."""
        with remote_errors("cannot read the history", self.url):
            self._fs.invalidate_cache()  # a listing from before another run was added
            try:
                return [str(name) for name in self._fs.ls(f"{self._root}/{folder}", detail=False)]
            except FileNotFoundError:
                return []

    def require(self) -> None:
        """Raise UsageError where there is no history: a folder without runs is a mistake in the command."""
        with remote_errors("cannot read the history", self.url):
            exists = any(self._fs.exists(f"{self._root}/{folder}") for folder in (RUNS, STARTED))
        if not exists:
            raise UsageError(f"there is no history at {self.url}: `consistency run --history` starts one")

    def runs(self, names: Sequence[str] | None = None) -> Iterator[RunRecord]:
        """Yield runs, the latest first; a damaged one is left out and named in `damage`.

        With `names`, which are paths as `names()` returns them, yield these runs in their order.
        """
        for name in self.names() if names is None else names:
            with remote_errors("cannot read the history", name):
                try:
                    raw = self._content(name)
                except FileNotFoundError:
                    continue  # removed since it was listed
                except NotReadError as error:
                    self.damage.append(f"{Path(name).name}: {error}")
                    continue
            try:
                run = decode_json(raw, RunRecord)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.damage.append(f"{Path(name).name}: {error}")
                continue
            if run.schema == SCHEMA:
                yield run
            else:
                self.damage.append(f"{Path(name).name}: unsupported schema {run.schema}")

    def earlier(self) -> Iterator[RunRecord]:
        """Yield runs as `runs` does, but read each of them once: the cases of a suite all ask for the latest."""
        if self._unread is None:
            self._unread = self.runs()
        yield from self._read
        for run in self._unread:
            self._read.append(run)
            yield run

    def table(self, name: str) -> Table | None:
        """Return a table by its name, None if it is gone or damaged."""
        try:
            raw = self._content(f"{self._root}/{TABLES}/{name}.json")
        except Exception:  # a remote store may raise anything; without the table it is still known that bits differ
            return None
        if hashlib.sha256(raw).hexdigest() != name:
            return None
        return msgspec.json.decode(raw, type=Table)

    def append(self, run: RunRecord, tables: dict[str, bytes]) -> None:
        """Add a run: its tables first, the run itself last.

        Raises
        ------
        CaptureError
            It cannot be written; then the history has no such run.
        """
        if self._is_local:
            for folder in (RUNS, TABLES, STARTED):
                remove_leftovers(Path(self._root, folder))
        self.put_tables(tables)
        left_out = len(run.findings) - _MOST_FINDINGS
        if left_out > 0:
            findings = (*run.findings[:_MOST_FINDINGS], f"and {left_out} more findings")
            run = msgspec.structs.replace(run, findings=findings)
        self.put_run(RUNS, run)
        self._read, self._unread = [], None  # `earlier` starts again, with this run

    def put_run(self, folder: str, run: RunRecord, name: str = "") -> str:
        """Write the record of a run to a folder of the history; return its path there."""
        stamp = run.at.replace("-", "").replace(":", "").replace(".", "").partition("+")[0]
        name = name or f"{stamp}-{uuid.uuid4().hex[:8]}.json"
        self._put(folder, name, encode_json(run) + b"\n")
        return f"{self._root}/{folder}/{name}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes of this host from removing runs meanwhile."""
        if not self._is_local:
            yield
            return
        with claimed(Path(self._root, CLAIM), wait_s=_WAIT_S):
            yield

    def local(self, place: str) -> Path | None:
        """Return the path of a file of the history on this host; None where the history is at a URL."""
        return Path(place) if self._is_local else None

    def put_tables(self, tables: dict[str, bytes]) -> None:
        """Write tables by their names; without a run that names them they change nothing."""
        for name, raw in tables.items():
            self._put(TABLES, f"{name}.json", raw)

    def modified(self, place: str) -> float | None:
        """Return when a file was written, in seconds since 1970; None where that is unknown."""
        with suppress(Exception):  # not every store knows, and each raises kinds of its own
            return float(self._fs.modified(place).timestamp())
        return None

    def remove(self, place: str) -> None:
        """Remove a file, if it is there."""
        with remote_errors("cannot remove a run of the history", place), suppress(FileNotFoundError):
            self._fs.rm_file(place)

    def _content(self, place: str) -> bytes:
        """Return the bytes of a file; on disk it is bounded, and has to be a regular one."""
        return read_regular(Path(place)) if self._is_local else bytes(self._fs.cat_file(place))

    def _put(self, folder: str, name: str, raw: bytes) -> None:
        """Write a file whole or not at all; others may write the same one at the same time."""
        place = f"{self._root}/{folder}/{name}"
        with remote_errors("cannot write the history", self.url):
            self._fs.makedirs(f"{self._root}/{folder}", exist_ok=True)
            if not self._is_local:
                self._fs.pipe_file(place, raw)
                return
        try:
            write_whole(Path(place), [raw])
        except CaptureError as error:
            raise CaptureError("cannot write the history", where=place, got=error.got) from None


DID_NOT_END, RUNNING = "did not end", "running"
"""Words in place of the verdict of a run that started and has no entry.

It is not known which of both holds for a run on another host's disk.
"""

NO_ENTRY = "has not ended"
"""The verdict in the note of a run, until the run ends or stops."""


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
    """Remove the claims that killed processes left, where their notes are gone."""
    for place in history.files_of(STARTED):
        path = history.local(place)
        if path is not None and path.name.endswith(CLAIM):
            note = path.with_name(path.name.removeprefix(".").removesuffix(CLAIM))
            if not note.exists():
                remove_abandoned(path)


def unfinished(history: History) -> Iterator[tuple[str, RunRecord]]:
    """Yield the notes of runs without an entry with their paths, the latest first.

    The verdict of a note says how its run stands: `RUNNING`, `DID_NOT_END`, or `NO_ENTRY` where that is not known.
    """
    places = sorted((name for name in history.files_of(STARTED) if name.endswith(".json")), reverse=True)
    for place in places:
        path = history.local(place)
        is_claimed = None if path is None else is_held(claim_of(path))
        for note in history.runs([place]):
            verdict = {True: RUNNING, False: DID_NOT_END, None: note.verdict}[is_claimed]
            yield place, msgspec.structs.replace(note, verdict=verdict)
