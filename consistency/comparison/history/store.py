"""A history: what each run saw of each device, in files that are never changed, so that a later run can detect drift.

::

    nights/<time>-<id>.json    one run: verdict, devices, a digest per device and stage; written last, the commit mark
    tables/<sha256>.json       the digest of every tensor of a worker; runs with equal digests share one

A history is a folder, on disk or at any URL that fsspec knows. A run is one file, which a disk renames into place and
an object store writes whole, so a reader sees all of it or nothing. Tables are named by their content and written
first.
"""

from __future__ import annotations

import datetime
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture.folder import Capture
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.transport import open_store, remote_errors
from consistency.capture.whole_file import write_whole
from consistency.comparison.by_worker import worst_ratios
from consistency.comparison.result import PLANTED, Comparison, tensor_name
from consistency.comparison.workers import ComparedWorker, gather
from consistency.errors import UsageError
from consistency.numerics.real import Real

SCHEMA = "consistency.history/1"
RUNS, TABLES = "nights", "tables"


class WorkerRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, rename={"load_path": "road"}
):
    """One worker of a run.

    Attributes
    ----------
    device : str
        Identity that outlives the run: the device's UUID, or host and name, with the kernel variant.
    software : str
        Digest of versions, kernels and settings: bits are compared only between equal software.
    inputs : str
        Digest of the bytes in the files, the dtype and the inputs.
    bits : dict of str to str
        Digest of all tensors, by stage.
    table : str
        Name of the table with the digest of every tensor.
    drift : tuple of str
        Stages that differ bitwise from the earlier runs, where this has not been accepted.
    case : str
        The case of a suite; empty where the run has one case.
    verdict : str
        Of the device, as in `by_worker`; empty in runs of versions that did not record it.
    bound_ratio : float or None
        Worst error/tolerance on the device.
    """

    name: str
    load_path: str
    device: str
    architecture: str
    model: str
    status: str
    software: str
    inputs: str
    bits: dict[str, str] = {}
    table: str = ""
    drift: tuple[str, ...] = ()
    simulated: bool = False
    case: str = ""
    verdict: str = ""
    bound_ratio: Real | None = None


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run.

    Attributes
    ----------
    case : str
        Name of the case, or of the suite.
    cases : dict of str to str
        Verdict of each case of a suite; its `workers` are those of all cases.
    report : str
        Folder of the run's report, on its host; empty where none was kept.
    planted : bool
        A fault was planted on purpose.
    """

    schema: str
    at: str
    host: str
    case: str
    verdict: str
    tool: str
    versions: dict[str, Any] = {}
    findings: tuple[str, ...] = ()
    workers: tuple[WorkerRecord, ...] = ()
    cases: dict[str, str] = {}
    report: str = ""
    planted: bool = False


Table = dict[str, str]
"""Digest of each tensor by `stage::layer.tensor`."""


class History:
    """A history to read and append to: a folder, or a URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = open_store(url, "cannot open the history")
        self.damage: list[str] = []
        self._read: list[RunRecord] = []
        self._unread: Iterator[RunRecord] | None = None

    def names(self) -> list[str]:
        """Return the names of the runs, the latest first."""
        with remote_errors("cannot read the history", self.url):
            try:
                found = self._fs.ls(f"{self._root}/{RUNS}", detail=False)
            except FileNotFoundError:
                return []
        return sorted((name for name in found if str(name).endswith(".json")), reverse=True)

    def require(self) -> None:
        """Raise UsageError where there is no history: a folder without runs is a mistake in the command."""
        with remote_errors("cannot read the history", self.url):
            exists = self._fs.exists(f"{self._root}/{RUNS}")
        if not exists:
            raise UsageError(f"there is no history at {self.url}: `consistency run --history` starts one")

    def runs(self, names: Sequence[str] | None = None) -> Iterator[RunRecord]:
        """Yield runs, the latest first; a damaged one is left out and named in `damage`."""
        for name in self.names() if names is None else names:
            with remote_errors("cannot read the history", name):
                raw = self._fs.cat_file(name)
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
            raw = self._fs.cat_file(f"{self._root}/{TABLES}/{name}.json")
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
        self.put_tables(tables)
        stamp = run.at.replace("-", "").replace(":", "").replace(".", "").partition("+")[0]
        with remote_errors("cannot write the history", self.url):
            self._fs.makedirs(f"{self._root}/{RUNS}", exist_ok=True)
            self._put(f"{self._root}/{RUNS}/{stamp}-{uuid.uuid4().hex[:8]}.json", encode_json(run) + b"\n")
        self._read, self._unread = [], None

    def put_tables(self, tables: dict[str, bytes]) -> None:
        """Write tables by their names; without a run that names them they change nothing."""
        with remote_errors("cannot write the history", self.url):
            self._fs.makedirs(f"{self._root}/{TABLES}", exist_ok=True)
            for name, raw in tables.items():
                place = f"{self._root}/{TABLES}/{name}.json"
                if not self._fs.exists(place):
                    self._put(place, raw)

    def _put(self, place: str, raw: bytes) -> None:
        protocol = self._fs.protocol
        if "file" in ((protocol,) if isinstance(protocol, str) else protocol):
            write_whole(Path(place), [raw])
        else:
            self._fs.pipe_file(place, raw)


def record_of(captures: Sequence[Capture], comparison: Comparison) -> tuple[RunRecord, dict[str, bytes]]:
    """Return what a run leaves in a history: its record, and its tables by name."""
    tables: dict[str, bytes] = {}
    workers = []
    ratios = worst_ratios(comparison)
    for participant in gather(captures):
        records = sorted(participant.records.items())
        raw = encode_json({tensor_name(*key): record.digest for key, record in records if record.digest is not None})
        name = hashlib.sha256(raw).hexdigest()
        tables[name] = raw
        ratio = ratios.get(participant.label)
        workers.append(_worker(participant, name, None if ratio is None else Real(ratio)))
    environment = comparison.workers[0].environment if comparison.workers else {}
    run = RunRecord(
        schema=SCHEMA,
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        host=captures[0].manifest.host,
        case=comparison.case,
        verdict=comparison.verdict,
        tool=captures[0].manifest.tool,
        versions={k: environment[k] for k in ("torch", "cuda", "transformers", "peft") if environment.get(k)},
        findings=tuple(f.message for f in comparison.findings if f.severity == "error"),
        workers=tuple(workers),
        planted=any(f.kind == PLANTED for f in comparison.findings),
    )
    return run, tables


def _worker(participant: ComparedWorker, table: str, ratio: Real | None) -> WorkerRecord:
    info = participant.info
    bits: dict[str, Any] = {}
    for key, record in participant.records.items():
        if record.digest is not None:
            bits.setdefault(key[0], hashlib.blake2b(digest_size=8)).update(f"{key}{record.digest}".encode())
    return WorkerRecord(
        name=participant.label,
        load_path=participant.load_path,
        device=participant.device,
        architecture=info.architecture,
        model=info.model,
        status=info.status,
        software=digest_of([info.kernel_key, info.driver, sorted(info.in_force.items(), key=str)]),
        inputs=_inputs(participant),
        bits={stage: h.hexdigest() for stage, h in bits.items()},
        table=table,
        simulated=info.simulated,
        bound_ratio=ratio,
    )


def _inputs(participant: ComparedWorker) -> str:
    """Return a digest of a worker's inputs: the files' bytes as it read them, or else name, size and time of each."""
    case = participant.case
    records = sorted(participant.records.items())
    parts: list[Any] = [case.dtype, case.level, participant.info.inputs_digest]
    for stage, folder in (("base", case.base), ("adapter", case.adapter)):
        read = [record.reference_digest for key, record in records if key[0] == stage and record.reference_digest]
        parts.append(read or _marks(folder))
    parts += [[one.name, _marks(one.path)] for one in case.adapters]
    return digest_of(parts)


def _marks(folder: str | None) -> list[Any]:
    """Identify the files of a folder that no stage read completely."""
    if not folder or not Path(folder).is_dir():
        return [folder]
    files = sorted(file for file in Path(folder).iterdir() if file.suffix in (".safetensors", ".bin", ".json"))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def digest_of(value: Any) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.blake2b(encode_json(value), digest_size=8).hexdigest()
