"""Fetch and deliver captures as one file (`host-a.zip`), or at any URL that fsspec supports.

One file is seen whole or not at all under its name, whoever looks for it and whatever ends the delivery.
"""

from __future__ import annotations

import re
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from consistency.capture.archive import is_member
from consistency.capture.bounded import check_count
from consistency.capture.folder import MANIFEST
from consistency.capture.reader import NoCaptureError
from consistency.capture.whole_file import WholeFile, remove_leftovers
from consistency.capture.writer import already_exists, cannot_write
from consistency.errors import CaptureError

ARCHIVE = ".zip"
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://|^[A-Za-z0-9]+::")

_RENAMING = frozenset({"file", "local", "sftp", "ssh", "smb", "hdfs", "arrow_hdfs"})
"""Protocols of file systems: a file is seen while it is written, and can be renamed in one step.

With any other protocol an object appears when it is complete, and renaming it would copy it."""


def is_remote(text: str) -> bool:
    """Tell whether a text is a URL, and no path."""
    return _URL.match(text) is not None


def travels(text: str) -> bool:
    """Tell whether a capture is to be one file, or stored somewhere else than in a local folder."""
    return is_remote(text) or text.endswith(ARCHIVE)


def is_archive(place: Path) -> bool:
    """Tell whether a local path is a capture in one file."""
    return place.is_file() and (place.name.endswith(ARCHIVE) or zipfile.is_zipfile(place))


def home_for(archive: Path, scratch: Path) -> Path:
    """Return the path of the folder to unpack an archive into; its name is the name of the capture."""
    return _new_folder(scratch) / archive.name.removesuffix(ARCHIVE)


def bring(text: str, scratch: Path) -> Path:
    """Return a capture as a local folder or ZIP file; one at a URL is fetched into `scratch`.

    Raises
    ------
    CaptureError
        It cannot be fetched; `NoCaptureError` where the URL has nothing of a capture.
    """
    if not is_remote(text):
        return Path(text)
    home = _new_folder(scratch) / (PurePosixPath(text.rstrip("/")).name or "capture")
    fs, path = open_store(text, "cannot open the place of the capture")
    with remote_errors("cannot fetch the capture", text), suppress(FileNotFoundError):
        if home.name.endswith(ARCHIVE):
            fs.get_file(path, str(home))
        else:
            _fetch_folder(fs, path, home)
    if not home.exists():
        raise NoCaptureError("no capture here", where=text, wanted=f"a folder with {MANIFEST}, or a ZIP file")
    return home


def _fetch_folder(fs: Any, path: str, home: Path) -> None:
    """Fetch the files of a capture from a folder; files with other names are left there."""
    files = fs.find(path)
    check_count(len(files))
    for file in files:
        relative = PurePosixPath(file).relative_to(PurePosixPath(path)).as_posix()
        if is_member(relative):
            (home / relative).parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(file, str(home / relative))


def refuse_to_replace(target: str) -> None:
    """Raise CaptureError where the place that a capture is to be delivered to is not empty."""
    if is_remote(target):
        fs, path = open_store(target, "cannot open the place of the capture")
        with remote_errors("cannot read the place of the capture", target):
            exists = fs.exists(path)
    else:
        exists = Path(target).exists()
    if exists:
        raise already_exists(target)


def deliver(folder: Path, target: str) -> None:
    """Deliver a complete capture to a ZIP file or a URL; its commit mark arrives last."""
    if not is_remote(target):
        pack(folder, Path(target))
        return
    fs, path = open_store(target, "cannot open the place of the capture")
    packed = folder.parent / f"{uuid.uuid4().hex}{ARCHIVE}"
    try:
        with remote_errors("cannot deliver the capture", target):
            if target.endswith(ARCHIVE):
                pack(folder, packed)
                _put(fs, packed, path)
                return
            if fs.exists(path):
                fs.rm(path, recursive=True)
            for file in _files(folder):
                remote = f"{path}/{file.relative_to(folder).as_posix()}"
                fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
                fs.put_file(str(file), remote)
    finally:
        packed.unlink(missing_ok=True)


def read_bytes(place: str) -> bytes:
    """Return the content of a file, or of an object at a URL."""
    fs, path = open_store(place, "cannot open the file")
    with remote_errors("cannot read", place):
        fs.invalidate_cache()  # a listing from before it was written
        return bytes(fs.cat_file(path))


def write_bytes(place: str, raw: bytes) -> None:
    """Write a file, or an object at a URL."""
    fs, path = open_store(place, "cannot open the file")
    with remote_errors("cannot write", place):
        fs.pipe_file(path, raw)


def open_store(url: str, what: str) -> tuple[Any, str]:
    """Return the file system of a URL or folder, and the path in it; `what` starts the error where there is none."""
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        hint = "is the package for this protocol installed?"
        raise CaptureError(what, where=url, got=error, hint=hint) from None
    return fs, str(path)


@contextmanager
def remote_errors(what: str, where: str) -> Iterator[None]:
    """Turn any error of a remote store into a `CaptureError`; `what` is its message, `where` its place."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:  # the stores of fsspec raise kinds of their own
        raise CaptureError(what, where=where, got=error) from None


def _put(fs: Any, packed: Path, path: str) -> None:
    """Copy a file to a store, so that it is seen whole or not at all."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
    if not protocols & _RENAMING:
        fs.put_file(str(packed), path)
        return
    parent, _, name = path.rpartition("/")
    partial = f"{parent}/.{name}.partial-{uuid.uuid4().hex[:8]}"
    fs.makedirs(parent, exist_ok=True)
    try:
        fs.put_file(str(packed), partial)
        fs.mv(partial, path)
    except BaseException:
        with suppress(Exception):  # each store has its own errors, and the first error is the one that counts
            fs.rm_file(partial)
        raise


def _files(folder: Path) -> list[Path]:
    """Return the files of a capture, its commit mark last."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: (path.name == MANIFEST, path))


def pack(folder: Path, target: Path) -> None:
    """Write a ZIP file of the files in a folder, whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        with WholeFile(target) as whole:
            with zipfile.ZipFile(whole.file, "w") as archive:
                for file in _files(folder):
                    # tensors hardly compress, and it takes long to find that out
                    kind = zipfile.ZIP_STORED if file.suffix == ".safetensors" else zipfile.ZIP_DEFLATED
                    archive.write(file, file.relative_to(folder).as_posix(), compress_type=kind)
            whole.commit()
    except OSError as error:
        raise cannot_write(target, error) from None


def _new_folder(scratch: Path) -> Path:
    """Return a new folder: captures with the same name do not meet in it."""
    folder = scratch / uuid.uuid4().hex[:8]
    folder.mkdir(parents=True)
    return folder
