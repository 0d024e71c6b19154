"""Read what may be a stranger's: regular files alone, inside their folder, and no more than a machine can hold.

A pipe would be waited for, a device would never end, and a link may lead to what its sender should not read. What is
refused is an `OSError`, which every reader turns into its own sentence. Standard library alone.
"""

from __future__ import annotations

import io
import math
import os
import stat
from pathlib import Path

from consistency.errors import UsageError

READ_LIMIT = "CONSISTENCY_READ_LIMIT"
"""Variable of the environment: a factor for all limits, for captures larger than any that was seen."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

MOST_BYTES = 2**30
"""Of a file that is read as a whole. The largest report seen has 416 MB, of 1000 workers with a row for each tensor."""

MOST_CAPTURE_BYTES = 2**32
"""Of a capture without its tensors. A worker of a 70 B model writes some 35 MB of records: this allows 100 of them."""

MOST_TENSOR_BYTES = 2**36
"""Of a stored tensor. The largest matrix of a 405 B model has 16384 x 128256 elements: 8.4 GB in float32."""

MOST_MEMBERS = 50_000
"""Of an archive, or files of a capture: a host's workers have four each, and tensors that are kept a file each."""

_DIRECTORY_BYTES = (
    MOST_MEMBERS * 160
)  # of an archive: a stored tensor takes 128, the longest name of a worker's file 190

_PACKED_AT_MOST, _SMALL_BYTES = 100, 2**26
"""Records are packed 4.5 times smaller. What claims to be 100 times larger than its archive is made to fill a disk."""


class NotReadError(OSError):
    """A file that is not read, or no further: its text says why."""

    def __str__(self) -> str:
        return str(self.args[0])


class BoundedReader:
    """Reads files of one folder, which together may have so many bytes.

    Parameters
    ----------
    root : Path or None
        No link leads out of it. None where the user has named the file itself.
    """

    def __init__(self, root: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._root = None if root is None else root.resolve()
        self._most = allowed(most_bytes)
        self._left = self._most

    def read(self, path: Path) -> bytes:
        """Return what is in a file; raise OSError where there is none, or it is refused."""
        check_regular(path, self._root)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            facts = os.fstat(file.fileno())
            _refuse_kind(facts.st_mode)
            most = min(self._left, allowed(MOST_BYTES))
            raw = b"" if facts.st_size > most else file.read(most + 1)  # it may grow
        if facts.st_size > most or len(raw) > most:
            raise too_large(max(facts.st_size, len(raw)), allowed(MOST_BYTES) if most < self._left else self._most)
        self._left -= len(raw)
        return raw


def read_regular(path: Path, root: Path | None = None) -> bytes:
    """Return what is in a file; raise OSError where there is none, or it is refused."""
    return BoundedReader(root).read(path)


def check_regular(path: Path, root: Path | None = None, *, most_bytes: int | None = None) -> None:
    """Raise OSError where a path leads to no regular file, out of a folder, or to more than so many bytes."""
    facts = path.stat()
    if root is not None and not path.resolve().is_relative_to(root.resolve()):
        raise NotReadError("a link that leads out of its folder: name the folder that it leads to")
    _refuse_kind(facts.st_mode)
    if most_bytes is not None and facts.st_size > allowed(most_bytes):
        raise too_large(facts.st_size, allowed(most_bytes))


class ArchiveFile(io.FileIO):
    """A ZIP file whose list of members is no longer than it may be: it is read at once, and long before it is used."""

    def __init__(self, path: Path) -> None:
        check_regular(path)
        super().__init__(path, "rb")

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > allowed(_DIRECTORY_BYTES):
            raise NotReadError(f"a list of members of {_size(size)}, {_at_most(_size(allowed(_DIRECTORY_BYTES)))}")
        return super().read(size) or b""


def check_count(count: int) -> None:
    """Raise OSError where an archive, or a folder at a URL, has too many members."""
    if count > allowed(MOST_MEMBERS):
        raise NotReadError(f"{count} members, {_at_most(str(allowed(MOST_MEMBERS)))}")


def check_unpacked(packed: int, unpacked: int, most_bytes: int) -> None:
    """Raise OSError where members claim to be more than any that are packed into so few bytes."""
    most = min(allowed(most_bytes), allowed(_SMALL_BYTES) + allowed(_PACKED_AT_MOST) * packed)
    if unpacked > most:
        raise too_large(unpacked, most)


def too_large(size: int, most: int) -> NotReadError:
    """Return the error for so many bytes."""
    return NotReadError(f"{_size(size)}, {_at_most(_size(most))}")


def allowed(most: int) -> int:
    """Return a limit as the user has raised it."""
    given = os.environ.get(READ_LIMIT) or "1"
    try:
        factor = float(given)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise UsageError(f"{READ_LIMIT} is out of range", got=given, wanted="a number above 0")
    return int(most * factor)


def _at_most(limit: str) -> str:
    return f"of which at most {limit} are read ({READ_LIMIT}=10 in the environment allows ten times as much)"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _refuse_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotReadError(f"{_KINDS.get(stat.S_IFMT(mode), 'no file')}, and no regular file")
