"""The format of a capture: a folder that holds what each worker saw, and that is safe to read from strangers.

::

    capture.json                  the commit mark: schema, case, which workers, sums of their files; written last
    workers/<slug>/worker.json    who the worker was, its environment, how it ended
    workers/<slug>/records.jsonl  one line per tensor: digests, measures, diagnosis
    workers/<slug>/events.jsonl   progress: each stage, and each step of a worker that was lost
    blobs/<sha256>.safetensors    tensors worth keeping, content-addressed: equal bytes are stored once for all devices

A folder with `capture.json` is whole. `writer.py` writes captures, `reader.py` reads them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from consistency.capture.archive import take_out
from consistency.capture.bounded import MOST_TENSOR_BYTES, check_regular
from consistency.capture.merge_effect import MergeEffect
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.case.case import Case
from consistency.devices.host.facts import HostFacts
from consistency.errors import CaptureError

SCHEMA = "consistency.capture/1"
MANIFEST = "capture.json"
CASES = "cases"
"""Folder of a suite with one folder per case, each with what a run or a capture leaves."""

_BLOB_NAME = re.compile(r"^[0-9a-f]{64}$")


class WorkerFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker's files have to be."""

    info: str
    records: str
    """`info`, `records`: SHA-256 of `worker.json` and of `records.jsonl`."""
    lines: int
    """Number of records."""


class CaptureManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The commit mark of a capture."""

    schema: str
    tool: str
    created: str
    """When it was complete: ISO 8601, UTC."""
    host: str
    case: Case
    workers: tuple[str, ...]
    command: tuple[str, ...] = ()
    """The command line that made it, word by word."""
    host_facts: HostFacts | None = None
    """Of the host that it was made on."""
    files: dict[str, WorkerFiles] = {}
    """Sums of what each worker wrote; the writer adds them."""
    sha256: str = ""
    """Of this file without these digits; the writer adds it, as the last field."""


class WorkerCapture(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a capture, read."""

    info: WorkerInfo
    parts: tuple[tuple[TensorRecord, ...], ...]
    """The records in order, cut where the stage changes. Workers that wrote the same bytes share a part."""

    @property
    def records(self) -> tuple[TensorRecord, ...]:
        """Return all records in order."""
        return tuple(itertools.chain.from_iterable(self.parts))

    @property
    def of_tensors(self) -> tuple[tuple[TensorRecord, ...], ...]:
        """Return the parts whose records are of tensors; the record of a `MergeEffect` is in a part of its own."""
        return tuple(part for part in self.parts if not part or part[0].merging is None)

    @property
    def merging(self) -> MergeEffect | None:
        """Return the effect of merging on the outputs; None where this worker did not measure it."""
        for part in self.parts:
            if part and part[0].merging is not None:
                return part[0].merging
        return None


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """A capture, read: its folder, its manifest and its workers."""

    folder: Path
    manifest: CaptureManifest
    workers: tuple[WorkerCapture, ...]
    damage: tuple[str, ...] = ()
    archive: Path | None = None
    """The ZIP file that its tensors are in, until they are asked for."""

    def blob_path(self, name: str) -> Path:
        """Return the path of a stored tensor's file, which a damaged capture lacks.

        Raises
        ------
        CaptureError
            The name is none of a stored tensor, or the file cannot be read.
        """
        path = self.folder / "blobs" / f"{blob_name(name)}.safetensors"
        if self.archive is not None and not path.exists():
            take_out(self.archive, path)
        try:
            check_regular(path, self.folder, most_bytes=MOST_TENSOR_BYTES)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CaptureError("a stored tensor cannot be read", where=path, got=error) from None
        return path


def blob_name(name: str) -> str:
    """Return the name of a stored tensor after a check; a capture from elsewhere must not name a path."""
    if not _BLOB_NAME.fullmatch(name):
        raise CaptureError("not the name of a kept tensor", got=name)
    return name


def worker_slug(name: str, load_path: str) -> str:
    """Return a folder name for a worker: `cuda_1@tf32.shared`."""
    return f"{name.replace(':', '_')}.{load_path}"


def pack_blocks(blocks: Sequence[int]) -> str:
    """Write block digests as 16 hexadecimal digits each; a single block has the tensor's own digest."""
    return "" if len(blocks) < 2 else "".join(f"{block:016x}" for block in blocks)


def unpack_blocks(text: str) -> tuple[int, ...]:
    """Read block digests as `TensorRecord.blocks` holds them."""
    return tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16))


def holds_capture(folder: Path) -> bool:
    """Tell whether a folder is a capture or a run, complete or not; otherwise its path was a mistake."""
    homes = (folder, folder / "captures")
    return any((home / MANIFEST).exists() or (home / "workers").exists() for home in homes)


def capture_name(folder: Path) -> str:
    """Return the name of a capture in a report: the name of its folder, of its run, or the path of its suite's case."""
    folder = home_of(folder)
    return "/".join(folder.parts[-3:]) if folder.parent.name == CASES else folder.name


def home_of(folder: Path) -> Path:
    """Return the folder that a user named for a capture's folder: a run writes its capture to `captures/` below it."""
    folder = folder.resolve()
    return folder.parent if folder.name == "captures" else folder


def blob_key(dtype: str, shape: Iterable[int], data: bytes | memoryview) -> str:
    """Return the content address of a tensor: SHA-256 over dtype, shape and bytes."""
    address = hashlib.sha256(f"{dtype}{list(shape)}".encode() + b"\0")
    address.update(data)
    return address.hexdigest()
