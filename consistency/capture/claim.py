"""Claims: files that a process holds locked while it works, so that no other process works in the same place.

The system drops the lock when the process ends, whatever ends it. So a claim that nobody holds is either of work that
has ended, or of a process that was killed: what it left is taken over, or removed. Standard library alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from consistency.errors import CaptureError

CLAIM = ".claim"
"""Name of the file that is the claim of a folder, in that folder."""

PARTIAL = ".partial"
"""Ending of the name of a hidden folder, in which something is made that will appear as a whole beside it."""

_PREFIX = "consistency-"
_NEW_CLAIM = f"{CLAIM}-new"
_SCRATCH = re.compile(_PREFIX + r"[a-z]+-[a-z0-9_]{8}")  # as `tempfile.mkdtemp` names it
_CLAIMED_WITHIN_S = 3600.0  # a scratch folder is claimed milliseconds after it is made
_HELD = (errno.EACCES, errno.EAGAIN)  # errors where another process holds the lock
_LOOK_S = 0.2  # whoever only looks whether a claim is held (`is_abandoned`) holds it for a moment
_MOST_TEXT = 300  # bytes of a claim


@contextmanager
def claimed(claim: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a claim, and remove it afterwards; its folder may be gone by then.

    Where the file system has no locks there is none: two processes at the same time are then not told apart.
    With `wait_s`, another process that holds it is waited for: for work that takes moments.

    Raises
    ------
    CaptureError
        Another process holds it, or it cannot be written.
    """
    try:
        descriptor = taken(claim, wait_s=wait_s)
    except OSError as error:
        raise CaptureError("cannot write into this folder", where=claim.parent, got=error) from None
    if descriptor is None:
        raise CaptureError(
            "another process writes to the same place",
            where=claim.parent,
            got=_holder(claim),
            hint="wait for it, or choose another place",
        )
    try:
        os.ftruncate(descriptor, 0)
        import platform  # takes longer than all that a command without a claim needs of this module

        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with suppress(OSError):  # a full disk: the lock holds without a text of who has it
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}, since {now}\n".encode())
        yield
    finally:
        with suppress(OSError):
            claim.unlink()  # before the lock is dropped, so that nobody has taken it over
        os.close(descriptor)


def claim_of(target: Path) -> Path:
    """Return the claim of a place where a file or folder will appear as a whole: beside it."""
    return target.parent / f".{target.name}{CLAIM}"


def is_abandoned(folder: Path) -> bool:
    """Tell whether the process that claimed a folder is gone; false for a folder of somebody else, or without claim."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
    except OSError:
        return False
    return is_held(folder / CLAIM) is False


def is_held(claim: Path) -> bool | None:
    """Tell whether a process holds a claim; None where there is none, or the file system has no locks."""
    try:
        descriptor = os.open(claim, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        is_locked = _lock(descriptor)
        return None if is_locked is None else not is_locked
    finally:
        os.close(descriptor)  # which drops the lock again


def remove_abandoned(path: Path) -> None:
    """Remove a file of this user that no process holds locked any more, or that none has ever locked.

    It is locked while it is removed: a process that has just made it, and locks it next, finds it gone (`taken`).
    """
    with suppress(OSError):
        if path.lstat().st_uid != os.getuid():
            return
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if _lock(descriptor):
                path.unlink()
        finally:
            os.close(descriptor)


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Yield a new folder for temporary files of this process; remove the folders that killed processes left."""
    import tempfile  # as with `platform`

    with suppress(OSError):
        for leftover in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            if is_abandoned(leftover) or _never_claimed(leftover):
                shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-"))
    descriptor = None
    try:
        descriptor = taken(folder / _NEW_CLAIM)
        os.replace(folder / _NEW_CLAIM, folder / CLAIM)  # it appears locked
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _never_claimed(folder: Path) -> bool:
    """Tell whether the process that made a scratch folder was killed before it could claim it: an hour ago, or more."""
    if not _SCRATCH.fullmatch(folder.name) or (folder / CLAIM).exists():
        return False
    try:
        stated = folder.lstat()
        is_empty = {path.name for path in folder.iterdir()} <= {_NEW_CLAIM}
    except OSError:
        return False
    is_own_folder = stat.S_ISDIR(stated.st_mode) and stated.st_uid == os.getuid()
    is_old = time.time() - stated.st_mtime > _CLAIMED_WITHIN_S
    return is_own_folder and is_empty and is_old


def taken(claim: Path, *, wait_s: float = 0.0) -> int | None:
    """Return the descriptor of a claim's open, locked file, which is made if it is not there.

    None where another process holds it, even after `wait_s` seconds.
    """
    until = time.monotonic() + max(wait_s, _LOOK_S)
    while True:
        descriptor = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        is_locked = _lock(descriptor)
        if is_locked is None:
            return descriptor
        with suppress(OSError):
            if is_locked and os.path.samestat(os.fstat(descriptor), claim.stat()):
                return descriptor
        # held by another process, or removed by the one that held it before: then it is made again
        os.close(descriptor)
        if not is_locked:
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK_S / 10)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file; return whether that was possible, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True


def _holder(claim: Path) -> str | None:
    """Return the line that the process which holds a claim wrote into it; None where there is none."""
    with suppress(OSError, UnicodeDecodeError), claim.open("rb") as file:
        return file.read(_MOST_TEXT).decode().strip() or None
    return None
