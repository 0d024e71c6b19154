"""Write a capture: in a folder next to its final place, moved there by one rename when it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from consistency.capture.claim import PARTIAL, claim_of, claimed
from consistency.capture.folder import MANIFEST, CaptureManifest
from consistency.capture.json_codec import encode_json
from consistency.capture.records import WorkerInfo
from consistency.capture.seal import files_of, sealed
from consistency.capture.whole_file import put_in_place, restore, write_whole
from consistency.errors import CaptureError

_RESERVE = ".reserve"
_RESERVE_BYTES = 2 << 20
"""Bytes for the files without which a capture is worthless: its manifest, and a table of 50 KiB for each of some 30
workers."""

T = TypeVar("T")


class CaptureWriter:
    """Writes a capture, which appears in its place only when it is complete.

    Use as a context manager: what is not committed is removed, and the folder around it that was made for it alone. The
    place is claimed meanwhile; what a killed process left of a capture for it is removed.

    Tensors and records of hours may fill a disk. `reserve` keeps some room until then, for the few tables without which
    nothing that was recorded could be compared.
    """

    def __init__(self, target: Path, *, replace: bool = False) -> None:
        self.target = target
        self.folder = target.parent / f".{target.name}{PARTIAL}"
        self._replace = replace
        with ExitStack() as stack:
            self._check_place()
            if not target.parent.exists():
                stack.callback(self._remove_parent)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(claimed(claim_of(target)))
                stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
                shutil.rmtree(self.folder, ignore_errors=True)
                restore(target)
                (self.folder / "workers").mkdir(parents=True)
                self.blobs.mkdir()
            except OSError as error:
                raise cannot_write(target, error) from None
            self._claim = stack.pop_all()

    def __enter__(self) -> CaptureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._claim.close()

    def _remove_parent(self) -> None:
        """Remove the folder around the place, which was made for this capture."""
        with suppress(OSError):  # something was written into it
            self.target.parent.rmdir()

    def _check_place(self) -> None:
        """Raise CaptureError where the place is not empty, and nobody said to replace what is there."""
        if self._replace:
            return
        is_empty = not self.target.exists()
        if self.target.is_dir():
            is_empty = not any(self.target.iterdir())
        if not is_empty:
            raise already_exists(self.target)

    @property
    def blobs(self) -> Path:
        """Return the folder of stored tensors."""
        return self.folder / "blobs"

    def worker_folder(self, slug: str) -> Path:
        """Return the folder of a worker, which is made if it is not there."""
        folder = self.folder / "workers" / slug
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(self.target, error) from None
        return folder

    @property
    def _reserve(self) -> Path:
        return self.folder / _RESERVE

    def reserve(self) -> None:
        """Keep room on the disk by a file of random bytes, which no file system stores in less."""
        with suppress(OSError):  # a disk that is full already is met by the first tensor
            if not self._reserve.exists():
                self._reserve.write_bytes(os.urandom(_RESERVE_BYTES))

    def _in_reserved_room(self, write: Callable[[], T]) -> T:
        """Call `write`, and where the disk is full, call it again in the room that was reserved for it."""
        try:
            return write()
        except (OSError, CaptureError):
            if not self._reserve.exists():
                raise
            self._reserve.unlink()
            return write()

    def write_worker(self, slug: str, info: WorkerInfo) -> None:
        """Write the table of a worker."""
        self._in_reserved_room(lambda: write_json(self.worker_folder(slug) / "worker.json", info))

    def commit(self, manifest: CaptureManifest) -> Path:
        """Write the manifest and move the capture to its place; return that place."""
        try:
            for leftover in self.blobs.glob("*.tmp"):
                leftover.unlink()
            files = {slug: files_of(self.folder / "workers" / slug) for slug in manifest.workers}
            content = sealed(msgspec.structs.replace(manifest, files=files, sha256=""))
            self._in_reserved_room(lambda: write_whole(self.folder / MANIFEST, [content]))
            self._reserve.unlink(missing_ok=True)
            self._check_place()
            put_in_place(self.folder, self.target)
        except OSError as error:
            raise cannot_write(self.target, error) from None
        return self.target


def already_exists(target: object) -> CaptureError:
    """Return the error for a place that is not empty, where nobody said to replace what is there."""
    return CaptureError(
        "the place of the new capture is not empty",
        where=target,
        hint="choose another --out, or give --force to replace what is there",
    )


def cannot_write(target: object, error: object = None) -> CaptureError:
    """Return the error for a capture that the system does not let us write."""
    return CaptureError("cannot write the capture", where=target, got=error)


def write_json(path: Path, value: object) -> None:
    """Write a value to a JSON file, whole or not at all."""
    write_whole(path, [encode_json(value, indent=1), b"\n"])
