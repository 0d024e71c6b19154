"""Unpack captures from ZIP files, which may be a stranger's: records at once, tensors when they are asked for.

An archive holds a capture's files under their names and nothing else. A member with another name is not unpacked, so a
stranger's archive can write nowhere but into the folder that is made for it.
"""

from __future__ import annotations

import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from consistency.capture.bounded import (
    MOST_CAPTURE_BYTES,
    MOST_TENSOR_BYTES,
    ArchiveFile,
    check_count,
    check_unpacked,
)
from consistency.errors import CaptureError

_RECORDS = re.compile(
    r"^(?:captures/)?(?:capture\.json|workers/[A-Za-z0-9][\w.@+-]{0,120}/[\w.-]+\.(?:json|jsonl|txt))$"
)
_TENSOR = re.compile(r"^(?:captures/)?blobs/[0-9a-f]{64}\.safetensors$")

_SPARE_BYTES = 2**28  # what unpacking has to leave free on the disk

_DAMAGE = (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error)
"""Errors of an archive that is cut short, changed, encrypted, or packed in a way that is not known."""


def is_member(name: str) -> bool:
    """Tell whether a file of a capture can have this name."""
    return _RECORDS.match(name) is not None or _TENSOR.match(name) is not None


def unpack(path: Path, home: Path) -> None:
    """Unpack a capture into a new folder, without its tensors; see `take_out`.

    Raises
    ------
    CaptureError
        It is damaged, or the disk has no room for it.
    """
    try:
        home.mkdir()
        with _opened(path) as archive:
            members = [member for member in archive.infolist() if _RECORDS.match(member.filename)]
            size = sum(member.file_size for member in members)
            check_unpacked(path.stat().st_size, size, MOST_CAPTURE_BYTES)
            _check_room(path, home, size)
            for member in members:
                archive.extract(member, home)  # never more than its file_size
    except _DAMAGE as error:
        raise CaptureError("cannot unpack the capture", where=path, got=error) from None


def take_out(path: Path, tensor: Path) -> None:
    """Unpack one tensor to a file that is named as in the archive; without such a tensor there is no file then."""
    try:
        with _opened(path) as archive:
            # the archive of a whole run has its capture in a folder
            member = f"{tensor.parent.name}/{tensor.name}"
            candidates = (member, f"captures/{member}")
            name = next((name for name in candidates if name in archive.NameToInfo), None)
            if name is None or not _TENSOR.match(name):
                return
            tensor.parent.mkdir(parents=True, exist_ok=True)
            size = archive.getinfo(name).file_size
            check_unpacked(path.stat().st_size, size, MOST_TENSOR_BYTES)
            _check_room(path, tensor.parent, size)
            with archive.open(name) as source, tensor.open("wb") as target:
                shutil.copyfileobj(source, target)
    except _DAMAGE as error:
        tensor.unlink(missing_ok=True)
        raise CaptureError("cannot unpack a stored tensor", where=path, got=error) from None


def read_member(path: Path, name: str) -> bytes:
    """Return one file of an archive, from its top or from a folder in it; a `CaptureError` where there is none."""
    try:
        with _opened(path) as archive:
            candidates = (name, f"{path.stem}/{name}")
            member = next((member for member in archive.infolist() if member.filename in candidates), None)
            if member is None:
                raise CaptureError(f"no {name} in this archive", where=path)
            check_unpacked(path.stat().st_size, member.file_size, MOST_CAPTURE_BYTES)
            return archive.read(member)
    except _DAMAGE as error:
        raise CaptureError(f"cannot read {name}", where=path, got=error) from None


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; raise OSError where it has too many members."""
    with ArchiveFile(path) as file, zipfile.ZipFile(file) as archive:
        check_count(len(archive.infolist()))
        yield archive


def _check_room(path: Path, folder: Path, size: int) -> None:
    """Raise CaptureError where the disk of a folder has no room for so many bytes."""
    if size > shutil.disk_usage(folder).free - _SPARE_BYTES:
        raise CaptureError("no room to unpack the capture", where=path, got=f"{size / 2**30:.1f} GiB")
