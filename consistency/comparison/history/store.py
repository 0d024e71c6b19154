"""A history: what each run saw of each device, in files that are never changed, so that a later run can detect drift.

::

    nights/<time>-<id>.json    one run: verdict, devices, a digest per device and stage; written last, the commit mark
    workers/<sha256>.parquet   the devices of a run with more than 64: fleets that saw the same share one
    tables/<sha256>.json       the digest of every tensor of a worker; runs with equal digests share one
    started/<time>-<id>.json   a run that has no entry yet (`unfinished.py`)

A history is a folder, on disk or at any URL that fsspec knows. A run is one file, which a disk renames into place and
an object store writes whole, so a reader sees all of it or nothing. Tables and workers are named by their content and
written first. Each run writes them anew even where they exist: `retention.py` removes none that was just written.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from consistency.capture.bounded import NotReadError, read_regular
from consistency.capture.claim import CLAIM, claimed, scratch_folder
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.transport import open_store, remote_errors
from consistency.capture.whole_file import remove_leftovers, write_whole
from consistency.capture.wording import when
from consistency.comparison.history.parquet import WorkerFiles
from consistency.comparison.history.records import (
    FLEET_SCHEMA,
    SCHEMA,
    FleetWorkers,
    RunRecord,
    Table,
    WorkerRecord,
    WorkerState,
    device_count,
    state_of,
)
from consistency.errors import CaptureError, UsageError

RUNS, TABLES, WORKERS, STARTED = "nights", "tables", "workers", "started"

MOST_IN_RECORD = 64
"""Devices of a run whose workers are in its own record: more than any one host has."""

_WAIT_S = 600.0  # for another process that removes old runs: of thousands, that takes minutes
_MOST_NAMES = 16  # of workers that drifted, in a list of runs
_MOST_FINDINGS = 64  # of a fleet, in its record: its report has all

T = TypeVar("T")


class History:
    """A history to read and append to: a folder, or a URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = open_store(url, "cannot open the history")
        protocol = self._fs.protocol
        self._is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)
        self.damage: list[str] = []
        self._read: list[RunRecord] = []
        self._unread: Iterator[RunRecord] | None = None
        self._worker_files: WorkerFiles | None = None
        self._last_states: tuple[str, list[WorkerState]] = ("", [])
        self._last_tables: tuple[str, set[str]] = ("", set())

    def names(self) -> list[str]:
        """Return the names of the runs, the latest first."""
        return sorted((name for name in self.files_of(RUNS) if name.endswith(".json")), reverse=True)

    def files_of(self, folder: str) -> list[str]:
        """Return the files of a folder of the history, with their paths."""
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

    def require_room(self, devices: int) -> None:
        """Raise UsageError where a run of so many devices cannot be added for want of a package."""
        if devices > MOST_IN_RECORD:
            self._parquet()

    def runs(self, names: Sequence[str] | None = None) -> Iterator[RunRecord]:
        """Yield runs, the latest first; a damaged one is left out and named in `damage`.

        The workers of a fleet are read by `workers` and `states`.
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
            if run.schema in (SCHEMA, FLEET_SCHEMA):
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

    def workers(
        self, run: RunRecord, devices: Collection[str] | None = None, **having: Collection[str]
    ) -> tuple[WorkerRecord, ...]:
        """Return the workers of a run, or those of some devices (identities or names), `having` these values of fields.

        A run whose workers cannot be read has none, and is named in `damage`.

        Raises
        ------
        UsageError
            They are in a file that needs a package which is not installed.
        """
        if run.fleet is None:
            return tuple(
                worker
                for worker in run.workers
                if (devices is None or worker.device in devices or worker.name in devices)
                and all(getattr(worker, name) in values for name, values in having.items())
            )
        files = self._parquet()
        return self._of_file(run, lambda path: files.workers(path, devices, **having), ())

    def states(self, run: RunRecord) -> list[WorkerState]:
        """Return the states of a run's workers: the same list for runs that follow each other and saw the same."""
        if run.fleet is None:
            return [(*worker.key, worker.name, state_of(worker)) for worker in run.workers]
        if self._last_states[0] != run.fleet.file:
            self._last_states = run.fleet.file, self._of_file(run, self._parquet().states, [])
        return self._last_states[1]

    def tables_of(self, run: RunRecord) -> set[str]:
        """Return the names of the tables of a run."""
        if run.fleet is None:
            return {worker.table for worker in run.workers}
        if self._last_tables[0] != run.fleet.file:
            self._last_tables = run.fleet.file, self._of_file(run, self._parquet().tables, set())
        return self._last_tables[1]

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
        UsageError
            It has more devices than a record holds, and DuckDB is not installed.
        """
        if self._is_local:
            for folder in (RUNS, TABLES, WORKERS, STARTED):
                remove_leftovers(Path(self._root, folder))
        self.put_tables(tables)
        if device_count(run) > MOST_IN_RECORD:
            run = self._with_workers_apart(run)
        self.put_run(RUNS, run)
        self._read, self._unread = [], None

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
        """Return a file of the history as a path of this host; None where it is elsewhere."""
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
        return read_regular(Path(place)) if self._is_local else bytes(self._fs.cat_file(place))

    def _parquet(self) -> WorkerFiles:
        if self._worker_files is None:
            self._worker_files = WorkerFiles(self.url)
        return self._worker_files

    def _with_workers_apart(self, run: RunRecord) -> RunRecord:
        """Write the workers of a run to their own file, and return the record that names it."""
        workers = sorted(run.workers, key=lambda worker: (worker.host, worker.name, worker.key))
        raw = self._parquet().render(workers)
        name = hashlib.sha256(raw).hexdigest()
        self._put(WORKERS, f"{name}.parquet", raw)
        drifted = {worker.device: worker.name for worker in workers if worker.drift}
        more = len(run.findings) - _MOST_FINDINGS
        findings = run.findings if more <= 0 else (*run.findings[:_MOST_FINDINGS], f"and {more} more findings")
        fleet = FleetWorkers(
            file=name,
            devices=device_count(run),
            hosts=len({worker.host or run.host for worker in workers}),
            lost=sum(worker.status != "ok" for worker in workers),
            drifted=tuple(drifted.values())[:_MOST_NAMES],
            drifted_devices=len(drifted),
            simulated=any(worker.simulated for worker in workers),
        )
        return msgspec.structs.replace(run, schema=FLEET_SCHEMA, findings=findings, workers=(), fleet=fleet)

    def _of_file(self, run: RunRecord, read: Callable[[Path], T], nothing: T) -> T:
        """Read the workers of a fleet's run from their file."""
        with ExitStack() as stack:
            path = self.workers_apart(run, stack)
            if path is None:
                return nothing
            try:
                return read(path)
            except ValueError as error:
                self._leave_out(run, error)
                return nothing

    def workers_apart(self, run: RunRecord, stack: ExitStack) -> Path | None:
        """Return the file with the workers of a fleet's run, on this host as long as the stack is open.

        Where it is gone, or is not what its name says, the run is named in `damage`.
        """
        name = "" if run.fleet is None else run.fleet.file
        place = f"{self._root}/{WORKERS}/{name}.parquet"
        try:
            raw = self._content(place)
        except Exception as error:  # the stores of fsspec raise kinds of their own
            self._leave_out(run, error)
            return None
        if hashlib.sha256(raw).hexdigest() != name:
            self._leave_out(run, "the file was changed")
            return None
        if self._is_local:
            return Path(place)
        scratch = stack.enter_context(scratch_folder("history"))
        path = scratch / f"{name}.parquet"
        path.write_bytes(raw)
        return path

    def _leave_out(self, run: RunRecord, error: object) -> None:
        text = f"the workers of the run of {when(run.at)} cannot be read: {error}"
        if text not in self.damage:
            self.damage.append(text)

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
