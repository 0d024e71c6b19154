"""Read a capture that may come from a stranger: nothing is unpickled, and every field is checked."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from consistency.capture.bounded import MOST_CAPTURE_BYTES, BoundedReader
from consistency.capture.folder import (
    MANIFEST,
    SCHEMA,
    Capture,
    CaptureManifest,
    WorkerCapture,
    WorkerFiles,
    capture_name,
    holds_capture,
)
from consistency.capture.json_codec import decode_json
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.capture.seal import check_files, check_manifest
from consistency.errors import CaptureError

T = TypeVar("T")

_SLUG = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.@+-]{0,120}$")
"""Pattern of the name of a worker's folder; a capture from elsewhere must not name a path."""

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
"""Fields of a record whose text repeats in every line of a tensor, even where its bits differ."""


class RecordPool:
    """Decode each distinct line once: workers that saw the same bits wrote the same line, and share one record.

    Eight thousand workers with two thousand tensors write sixteen million lines, of which a healthy fleet has some
    thousand distinct ones. The lines of a stage are mostly equal as a whole: then they are not even looked up one by
    one. Lines are identified by a hash for which a stranger's capture cannot be made to collide.
    """

    def __init__(self) -> None:
        self._records: dict[bytes, TensorRecord] = {}
        self._texts: dict[str, str] = {}
        self._parts: dict[bytes, tuple[TensorRecord, ...]] = {}
        # stages of each part that names no tensor twice, by the `id` of the part: parts are never removed
        self._stages: dict[int, frozenset[str]] = {}

    def part(self, lines: Sequence[bytes]) -> tuple[TensorRecord, ...]:
        """Return the records of lines that follow each other; raise `DamagedLineError` where one is no record."""
        name = hashlib.sha256(b"\n".join(lines)).digest()  # half the time of BLAKE2 where the processor has it
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = tuple(self._decoded(lines))
            if len({(record.load_path, *record.key) for record in part}) == len(part):
                self._stages[id(part)] = frozenset(record.stage for record in part)
        return part

    def names_no_tensor_twice(self, parts: Sequence[tuple[TensorRecord, ...]]) -> bool:
        """Return whether these parts certainly name no tensor twice, without a look at their records.

        That is certain where each part names none twice, and no two parts have a stage in common.
        """
        stages = [self._stages.get(id(part)) for part in parts]
        known = [names for names in stages if names is not None]
        return len(known) == len(parts) and len(frozenset().union(*known)) == sum(map(len, known))

    def _decoded(self, lines: Iterable[bytes]) -> Iterator[TensorRecord]:
        for index, line in enumerate(lines):
            try:
                yield self.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DamagedLineError(index) from error

    def decode(self, line: bytes) -> TensorRecord:
        """Return the record of a line."""
        name = hashlib.blake2b(line, digest_size=16).digest()
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = decode_json(line, TensorRecord)
            # Each distinct text is kept once, whichever records have it.
            for field in _REPEATED_TEXTS:
                text = getattr(record, field)
                if text:
                    msgspec.structs.force_setattr(record, field, self._texts.setdefault(text, text))
        return record


class NoCaptureError(CaptureError):
    """Nothing in a place belongs to a capture: a mistake in the command, and no damage."""


class DamagedLineError(ValueError):
    """A line is no record; `args` has its index among the lines of its part, and the error is the cause."""


def read_capture(folder: Path, pool: RecordPool | None = None) -> Capture:
    """Read a capture, or the capture inside the folder of a run.

    A worker whose files are damaged is left out and named in `damage`; the rest is read. Captures that are compared
    share one `pool`: what is equal in them is decoded and kept once.

    Raises
    ------
    CaptureError
        There is no capture, it is of another schema, or its manifest is damaged.
    """
    root = folder if (folder / MANIFEST).exists() else folder / "captures"
    if not (root / MANIFEST).exists():
        kind = CaptureError if holds_capture(folder) else NoCaptureError
        raise kind("no capture here", where=folder, wanted=f"a folder with {MANIFEST}, or the --out folder of a run")
    reader = BoundedReader(folder, MOST_CAPTURE_BYTES)
    manifest = _read_manifest(root / MANIFEST, reader)
    pool = pool or RecordPool()
    workers: list[WorkerCapture] = []
    damage: list[str] = []
    for slug in dict.fromkeys(manifest.workers):
        try:
            workers.append(_read_worker(root, slug, manifest, reader, pool))
        except CaptureError as error:
            damage.append(f"worker {slug}: {brief(error)}")
    damage += _unlisted(root, manifest)
    name = capture_name(folder)
    return Capture(
        folder=root, manifest=manifest, workers=tuple(workers), damage=tuple(f"{name}: {text}" for text in damage)
    )


def _read_worker(
    root: Path, slug: str, manifest: CaptureManifest, reader: BoundedReader, pool: RecordPool
) -> WorkerCapture:
    """Read one worker of a capture by the name of its folder; raise CaptureError where its files are damaged."""
    if not _SLUG.fullmatch(slug):
        raise CaptureError("not the name of a worker", got=slug)
    folder, files = root / "workers" / slug, manifest.files.get(slug)
    if files is None:
        raise CaptureError(f"{MANIFEST} has no sums of its files", where=root / MANIFEST)
    info = _read_info(folder / "worker.json", files, reader)
    parts = tuple(read_parts(folder / "records.jsonl", pool, reader, files, whole=info.status == "ok"))
    # most parts are known from other workers, and need no look at each record
    if not pool.names_no_tensor_twice(parts):
        _refuse_doubles(parts, folder / "records.jsonl")
    return WorkerCapture(info=info, parts=parts)


def _unlisted(root: Path, manifest: CaptureManifest) -> Iterator[str]:
    """Yield why a list of workers is damaged: a worker that it omits would look as if it had never been asked for."""
    if not manifest.workers:
        yield f"{MANIFEST} names no worker"
        return
    for info in sorted((root / "workers").glob("*/worker.json")):
        slug = info.parent.name
        if _SLUG.fullmatch(slug) and slug not in manifest.workers:
            yield f"worker {slug}: {MANIFEST} does not name it"


def brief(error: CaptureError) -> str:
    """Return an error about a part of a capture in one line: `worker.json is missing (wanted ...)`."""
    facts = (error.got, error.wanted and f"wanted {error.wanted}")
    text = ", ".join(fact for fact in facts if fact)
    return f"{error.what} ({text})" if text else error.what


def read_parts(
    path: Path, pool: RecordPool, reader: BoundedReader, files: WorkerFiles | None = None, *, whole: bool = False
) -> Iterator[tuple[TensorRecord, ...]]:
    """Yield the records of a worker, cut where the stage changes.

    The file of a worker that ended well has to be `whole`; in the file of one that died, a line that was cut short is
    left out. With the sums in `files` the file has to be what was written.

    Raises
    ------
    CaptureError
        The file is missing, cut short, damaged or changed.
    """
    try:
        raw = reader.read(path)
    except FileNotFoundError:
        # a worker that died before its first record has no file
        if whole or (files is not None and files.lines):
            raise CaptureError(f"{path.name} is missing", where=path) from None
        return
    except OSError as error:
        raise CaptureError("cannot read the records", where=path, got=error) from None
    lines = raw.split(b"\n")
    if whole and lines[-1]:
        raise CaptureError(f"{path.name} ends in the middle of line {len(lines)}", where=path)
    before = 0
    for _, stage_lines in itertools.groupby(lines[:-1], key=_opening):
        part = list(stage_lines)
        try:
            yield pool.part(part)
        except DamagedLineError as error:
            number = before + error.args[0] + 1
            raise CaptureError(f"line {number} is damaged", where=path, got=error.__cause__) from None
        before += len(part)
    if files is not None:
        check_files(path.name, raw, files, path)


def _opening(line: bytes) -> bytes:
    """Return the first field of a line, which is its stage."""
    return line[: line.find(b",")]


def _refuse_doubles(parts: Sequence[tuple[TensorRecord, ...]], path: Path) -> None:
    """Raise CaptureError where a tensor was recorded twice: which of the two is valid is unknown."""
    lines: dict[tuple[str, ...], int] = {}
    for number, record in enumerate(itertools.chain.from_iterable(parts), start=1):
        first = lines.setdefault((record.load_path, *record.key), number)
        if first != number:
            tensor = f"{record.stage}::{record.layer}.{record.tensor}"
            raise CaptureError(f"line {number} names the same tensor as line {first}", where=path, got=tensor)


def _read_manifest(path: Path, reader: BoundedReader) -> CaptureManifest:
    """Read the manifest; its schema is checked before its fields, which another schema may have otherwise."""
    raw = _read(path, reader)
    schema = _decode(path, raw, dict[str, Any]).get("schema")
    if schema != SCHEMA:
        raise CaptureError("a capture of another schema", where=path, got=schema, wanted=SCHEMA)
    manifest = _decode(path, raw, CaptureManifest)
    check_manifest(raw, path)
    return manifest


def _read_info(path: Path, files: WorkerFiles, reader: BoundedReader) -> WorkerInfo:
    raw = _read(path, reader)
    info = _decode(path, raw, WorkerInfo)
    check_files(path.name, raw, files, path)
    return info


def _read(path: Path, reader: BoundedReader) -> bytes:
    try:
        return reader.read(path)
    except FileNotFoundError:
        raise CaptureError(f"{path.name} is missing", where=path) from None
    except OSError as error:
        raise CaptureError("cannot read", where=path, got=error) from None


def _decode(path: Path, raw: bytes, kind: type[T]) -> T:
    try:
        return decode_json(raw, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CaptureError(f"{path.name} is damaged", where=path, got=error) from None
