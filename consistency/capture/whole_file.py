"""Write a file or a folder whole or not at all: under another name beside it, then renamed. Standard library alone.

Several processes may write the same file at a time: each has its own temporary one, locked while it writes, and the
last to rename wins. A temporary file that nobody holds locked is left by a killed process, and removed by the next run.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from consistency.capture.claim import remove_abandoned, taken
from consistency.errors import CaptureError

_PREFIX, _SUFFIX = ".consistency-", ".tmp"


class WholeFile:
    """A file that appears only when it is complete; use as a context manager, which removes what is not committed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._partial, descriptor = _new_partial(path.parent)
        except OSError as error:
            raise _cannot_write(path, error) from None
        self.file: BinaryIO = os.fdopen(descriptor, "w+b")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)  # before the lock is dropped
        with suppress(OSError):
            self.file.close()

    def write(self, parts: Iterable[bytes]) -> None:
        """Write all parts, which are not seen before `commit`."""
        try:
            self.file.writelines(parts)
            self.file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def commit(self) -> None:
        """Rename the file to its own name, in the place of an earlier file."""
        try:
            self.file.flush()
            os.replace(self._partial, self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from None


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file part by part, whole or not at all."""
    with WholeFile(path) as whole:
        whole.write(parts)
        whole.commit()


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder."""
    with suppress(OSError):
        for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            remove_abandoned(path)


def write_fully(descriptor: int, content: bytes) -> None:
    """Write all bytes to an open file: the system may take only a part of them, where a disk is nearly full."""
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def put_in_place(made: Path, target: Path) -> None:
    """Rename a file or folder, which was made beside its place, to its place; what was there is removed after that.

    A process that is killed in between leaves what was there under another name, for `restore`.
    """
    aside = _aside(target)
    _remove(aside)
    # a file takes the place of another file in one rename; a folder has to be moved aside first
    target_is_folder = target.is_dir() and not target.is_symlink()
    if target_is_folder or (made.is_dir() and os.path.lexists(target)):
        os.replace(target, aside)
    try:
        os.replace(made, target)
    except OSError:
        restore(target)
        raise
    _remove(aside)


def restore(target: Path) -> None:
    """Put back what a killed process had moved aside, unless its own result is in place already."""
    aside = _aside(target)
    if os.path.lexists(aside) and not os.path.lexists(target):
        os.replace(aside, target)
    else:
        _remove(aside)


def _aside(target: Path) -> Path:
    """Return where the former content of a place is kept until the new content is there."""
    return target.with_name(f".{target.name}.earlier")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _new_partial(folder: Path) -> tuple[Path, int]:
    """Return a new temporary file of a folder, open and locked."""
    while True:
        path = folder / f"{_PREFIX}{uuid.uuid4().hex}{_SUFFIX}"
        descriptor = taken(path)
        if descriptor is not None:
            return path, descriptor


def _cannot_write(path: Path, error: OSError) -> CaptureError:
    return CaptureError("cannot write", where=path, got=error)


def as_readable_as_its_folder(path: Path) -> None:
    """Let whoever may read a file's folder read the file: safetensors makes files for their owner alone."""
    path.chmod(path.parent.stat().st_mode & 0o666)
