"""The folder that a capture is: what each worker saw, in a form that travels and is safe to read from strangers.

::

    capture.json                  the commit mark: schema, case, which workers, written last
    workers/<slug>/worker.json    who the worker was, its environment, how it ended
    workers/<slug>/records.jsonl  one line per tensor: digests, measures, diagnosis
    workers/<slug>/events.jsonl   progress: each stage, and each step of a worker that was lost
    blobs/<sha256>.safetensors    tensors worth keeping, content-addressed: equal bytes are stored once for all devices

A capture is written beside its final place and renamed, so a folder with `capture.json` is whole. Reading never
unpickles; every field is checked against the types here and in `records.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.records import TensorRecord, WorkerInfo, read_record
from consistency.case.case import Case
from consistency.devices.host.facts import HostFacts
from consistency.errors import CaptureError

SCHEMA = "consistency.capture/1"
MANIFEST = "capture.json"
_BLOB_NAME = re.compile(r"^[0-9a-f]{64}$")
_SLUG = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.@+-]{0,120}$")

T = TypeVar("T")


class CaptureManifest(msgspec.Struct, frozen=True, kw_only=True, rename={"host_facts": "box"}):
    """The commit mark of a capture.

    Attributes
    ----------
    box : Box or None
        The machine that it was made on; captures of earlier versions have none.
    """

    schema: str
    tool: str
    created: str
    host: str
    case: Case
    workers: tuple[str, ...]
    host_facts: HostFacts | None = None


class WorkerCapture(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a capture, read."""

    info: WorkerInfo
    records: tuple[TensorRecord, ...]


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """A capture, read: its folder, its manifest and its workers."""

    folder: Path
    manifest: CaptureManifest
    workers: tuple[WorkerCapture, ...]
    damage: tuple[str, ...] = ()

    def blob_path(self, name: str) -> Path:
        return self.folder / "blobs" / f"{blob_name(name)}.safetensors"


def blob_name(name: str) -> str:
    """Return the name of a blob if it is one; a capture from elsewhere must not name a path."""
    if not _BLOB_NAME.fullmatch(name):
        raise CaptureError("not the name of a kept tensor", got=name)
    return name


def worker_slug(name: str, load_path: str) -> str:
    """Return a folder name for a worker: `cuda_1@tf32.shared`."""
    return f"{name.replace(':', '_')}.{load_path}"


def unpack_blocks(text: str) -> tuple[int, ...]:
    """Read block digests as `TensorRecord.blocks` holds them."""
    return tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16))


class CaptureWriter:
    """A capture in the making, in a folder of its own beside the final one.

    Use as a context manager: what is not committed is removed.
    """

    def __init__(self, target: Path, *, replace: bool = False) -> None:
        self.target = target
        if target.exists() and not replace and any(target.iterdir() if target.is_dir() else [target]):
            raise CaptureError(
                "there is something in the place of the new capture",
                where=target,
                hint="choose another --out, or give --force to replace it",
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.folder = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}"
            (self.folder / "workers").mkdir(parents=True)
            (self.folder / "blobs").mkdir()
        except OSError as error:
            raise CaptureError("cannot write the capture", where=target, got=error) from None

    def __enter__(self) -> CaptureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    def worker_folder(self, slug: str) -> Path:
        folder = self.folder / "workers" / slug
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise CaptureError("cannot write the capture", where=self.target, got=error) from None
        return folder

    def write_worker(self, slug: str, info: WorkerInfo) -> None:
        write_json(self.worker_folder(slug) / "worker.json", info)

    def commit(self, manifest: CaptureManifest) -> Path:
        """Write the manifest and move the capture to its place; return that place."""
        try:
            for leftover in self.folder.glob("blobs/*.tmp"):
                leftover.unlink()
            write_json(self.folder / MANIFEST, manifest)
            if self.target.exists():
                shutil.rmtree(self.target)
            os.replace(self.folder, self.target)
        except OSError as error:
            raise CaptureError("cannot write the capture", where=self.target, got=error) from None
        return self.target


def write_json(path: Path, value: object) -> None:
    """Write a file whole or not at all."""
    write_whole(path, [encode_json(value, indent=1), b"\n"])


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file part by part, whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise CaptureError("cannot write", where=path, got=error) from None


class RecordPool:
    """Decode each line once: workers that saw the same bits wrote the same line, and share one record.

    A thousand workers with two thousand tensors write two million lines, of which a healthy fleet has some thousand
    different ones. Lines are told apart by a hash that a stranger's capture cannot be made to collide in.
    """

    def __init__(self) -> None:
        self._records: dict[bytes, TensorRecord] = {}
        self._texts: dict[str, str] = {}

    def decode(self, line: bytes) -> TensorRecord:
        name = hashlib.blake2b(line, digest_size=16).digest()
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = read_record(line)
            for field in _REPEATED_TEXTS:  # the same words in every line of a tensor, whatever its bits
                text = getattr(record, field)
                if text:
                    msgspec.structs.force_setattr(record, field, self._texts.setdefault(text, text))
        return record


_REPEATED_TEXTS = (
    "stage",
    "layer",
    "tensor",
    "dtype",
    "rule",
    "reference",
    "reference_digest",
    "reason",
    "load_path",
)


def read_capture(folder: Path, pool: RecordPool | None = None) -> Capture:
    """Read a capture, or the capture inside the folder of a run.

    A worker whose files are damaged is left out and named in `damage`; the rest is read.

    Parameters
    ----------
    folder : Path
    pool : RecordPool, optional
        One for all captures that are going to be compared: what is equal in them is decoded and kept once.

    Raises
    ------
    CaptureError
        There is no capture, it is of another schema, or its manifest is damaged.
    """
    root = folder if (folder / MANIFEST).exists() else folder / "captures"
    if not (root / MANIFEST).exists():
        raise CaptureError(
            "no capture here", where=folder, wanted=f"a folder with {MANIFEST}, or the --out folder of a run"
        )
    manifest = _read(root / MANIFEST, CaptureManifest, schema=True)
    pool = pool or RecordPool()
    workers: list[WorkerCapture] = []
    damage: list[str] = []
    for slug in dict.fromkeys(manifest.workers):
        try:
            if not _SLUG.fullmatch(slug):
                raise CaptureError("not the name of a worker", got=slug)
            home = root / "workers" / slug
            info = _read(home / "worker.json", WorkerInfo)
            records = tuple(read_records(home / "records.jsonl", pool, whole=info.status == "ok"))
            _refuse_doubles(records, home / "records.jsonl")
            workers.append(WorkerCapture(info=info, records=records))
        except CaptureError as error:
            damage.append(f"{capture_name(folder)}: worker {slug}: {tell(error)}")
    damage += (f"{capture_name(folder)}: {text}" for text in _unlisted(root, manifest))
    return Capture(folder=root, manifest=manifest, workers=tuple(workers), damage=tuple(damage))


def _unlisted(root: Path, manifest: CaptureManifest) -> Iterator[str]:
    """Say where the list of workers was cut: what it leaves out would else be taken for never asked for."""
    if not manifest.workers:
        yield f"{MANIFEST} names no worker"
        return
    for info in sorted((root / "workers").glob("*/worker.json")):
        slug = info.parent.name
        if _SLUG.fullmatch(slug) and slug not in manifest.workers:
            yield f"worker {slug}: {MANIFEST} does not name it"


def holds_capture(folder: Path) -> bool:
    """Tell whether a folder is a capture, or of a run, whole or not; else its path was a mistake."""
    homes = (folder, folder / "captures")
    return any((home / name).exists() for home in homes for name in (MANIFEST, "workers"))


def capture_name(folder: Path) -> str:
    """Return what a report calls a capture: its folder's name, or that of the run it lies in."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "captures" else folder.name


def tell(error: CaptureError) -> str:
    """Say in one line what is wrong with a part of a capture."""
    facts = [f"{error.got}" if error.got else "", f"wanted {error.wanted}" if error.wanted else ""]
    text = ", ".join(fact for fact in facts if fact)
    return f"{error.what} ({text})" if text else error.what


def read_records(path: Path, pool: RecordPool | None = None, *, whole: bool = False) -> Iterator[TensorRecord]:
    """Yield the records of a worker.

    Parameters
    ----------
    path : Path
    pool : RecordPool, optional
    whole : bool
        The worker ended well, so the file was there and its last line was too. Of a worker that died, a line that was
        cut short is left out.
    """
    pool = pool or RecordPool()
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        if whole:
            raise CaptureError(f"{path.name} is missing", where=path) from None
        return
    except OSError as error:
        raise CaptureError("cannot read the records", where=path, got=error) from None
    lines = raw.split(b"\n")
    if whole and lines[-1]:
        raise CaptureError(f"{path.name} ends in the middle of line {len(lines)}", where=path)
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield pool.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CaptureError(f"line {number} is damaged", where=path, got=error) from None


def _refuse_doubles(records: Sequence[TensorRecord], path: Path) -> None:
    """Raise where a tensor was recorded twice: nobody can tell which of the two holds."""
    if len({(record.load_path, *record.key) for record in records}) == len(records):
        return
    first: dict[tuple[str, ...], int] = {}
    for number, record in enumerate(records, start=1):
        place = (record.load_path, *record.key)
        if place in first:
            raise CaptureError(
                f"line {number} is about the same tensor as line {first[place]}",
                where=path,
                got=f"{record.stage}::{record.layer}.{record.tensor}",
            )
        first[place] = number


def _read(path: Path, kind: type[T], *, schema: bool = False) -> T:
    try:
        raw = path.read_bytes()
        if schema:
            found = msgspec.json.decode(raw, type=dict[str, Any]).get("schema")
            if found != SCHEMA:
                raise CaptureError("a capture of another schema", where=path, got=found, wanted=SCHEMA)
        return decode_json(raw, kind)
    except FileNotFoundError:
        raise CaptureError(f"{path.name} is missing", where=path) from None
    except OSError as error:
        raise CaptureError("cannot read", where=path, got=error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CaptureError(f"{path.name} is damaged", where=path, got=error) from None


def blob_key(dtype: str, shape: Iterable[int], data: bytes | memoryview) -> str:
    """Return the content address of a tensor: SHA-256 over dtype, shape and bytes."""
    h = hashlib.sha256(f"{dtype}{list(shape)}".encode() + b"\0")
    h.update(data)
    return h.hexdigest()
