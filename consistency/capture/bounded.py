"""Read files that may be a stranger's: only regular ones, inside their folder, and no more than a machine can hold.

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
"""Environment variable with a factor for all limits, for captures larger than any that was seen."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

MOST_BYTES = 2**30
"""Most bytes of a file that is read as a whole. The largest report seen has 416 MB, of 1000 workers with a row for each
tensor."""

MOST_CAPTURE_BYTES = 2**32
"""Most bytes of a capture without its tensors. A worker of a 70 B model writes some 35 MB of records: this allows 100
of them."""

MOST_TENSOR_BYTES = 2**36
"""Most bytes of a stored tensor. The largest matrix of a 405 B model has 16384 x 128256 elements: 8.4 GB in float32."""

MOST_MEMBERS = 50_000
"""Most members of an archive, or files of a capture: a host's workers have four each, and each tensor that is kept has
one."""

# Most bytes of an archive's list of members: a stored tensor takes 128, the longest name of a worker's file 190.
_DIRECTORY_BYTES = MOST_MEMBERS * 160

# Records are packed 4.5 times smaller. An archive that claims to be 100 times larger unpacked is made to fill a disk.
_PACKED_AT_MOST, _SMALL_BYTES = 100, 2**26


class NotReadError(OSError):
    """A file that is not read, or no further: its text says why."""

    def __str__(self) -> str:
        return str(self.args[0])


class BoundedReader:
    """Reads files of one folder, up to a number of bytes for all of them together.

    Parameters
    ----------
    root : Path or None
        No link leads out of it. None where the user has named the file itself.
    most_bytes : int
        The limit for all files together.
    """

    def __init__(self, root: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._root = None if root is None else root.resolve()
        self._total_bytes = allowed(most_bytes)
        self._remaining_bytes = self._total_bytes

    def read(self, path: Path) -> bytes:
        """Return the content of a file; raise OSError where there is none, or it is refused."""
        check_regular(path, self._root)
        # Without waiting: the path may have become a pipe since it was checked.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            stated = os.fstat(file.fileno())
            _refuse_kind(stated.st_mode)
            limit = min(self._remaining_bytes, allowed(MOST_BYTES))
            raw = b"" if stated.st_size > limit else file.read(limit + 1)  # it may grow
        if stated.st_size > limit or len(raw) > limit:
            is_one_file = limit < self._remaining_bytes
            raise too_large(max(stated.st_size, len(raw)), allowed(MOST_BYTES) if is_one_file else self._total_bytes)
        self._remaining_bytes -= len(raw)
        return raw


def read_regular(path: Path, root: Path | None = None) -> bytes:
    """Return the content of a file; raise OSError where there is none, or it is refused."""
    return BoundedReader(root).read(path)


def check_regular(path: Path, root: Path | None = None, *, most_bytes: int | None = None) -> None:
    """Raise OSError where a path leads to no regular file, out of the folder `root`, or to more than `most_bytes`."""
    stated = path.stat()
    if root is not None and not path.resolve().is_relative_to(root.resolve()):
        raise NotReadError("a link that leads out of its folder: name the folder that it leads to")
    _refuse_kind(stated.st_mode)
    if most_bytes is not None and stated.st_size > allowed(most_bytes):
        raise too_large(stated.st_size, allowed(most_bytes))


class ArchiveFile(io.FileIO):
    """A ZIP file that refuses a list of members which is too long.

    `zipfile` reads the list in one piece when it opens the file, before any member could be counted.
    """

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
    """Raise OSError where members claim more bytes than can be packed into so few, or more than `most_bytes`."""
    limit = min(allowed(most_bytes), allowed(_SMALL_BYTES) + allowed(_PACKED_AT_MOST) * packed)
    if unpacked > limit:
        raise too_large(unpacked, limit)


def too_large(size: int, most: int) -> NotReadError:
    """Return the error for a file of `size` bytes where `most` are read."""
    return NotReadError(f"{_size(size)}, {_at_most(_size(most))}")


def allowed(most: int) -> int:
    """Return a limit as the user has raised it by the environment variable."""
    text = os.environ.get(READ_LIMIT) or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise UsageError(f"{READ_LIMIT} is out of range", got=text, wanted="a number above 0")
    return int(most * factor)


def _at_most(limit: str) -> str:
    return f"of which at most {limit} are read ({READ_LIMIT}=10 in the environment allows ten times as much)"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _refuse_kind(mode: int) -> None:
    """Raise OSError unless a file's mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise NotReadError(f"{_KINDS.get(stat.S_IFMT(mode), 'no file')}, and no regular file")
