"""Captures as one file (`host-a.zip`), or at any URL that fsspec supports: fetched from there and delivered there.

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
"""Protocols of file systems, where a file that is being written is seen, and is renamed at once; an object of the
others appears when it is complete, and is copied to be renamed."""


def is_remote(text: str) -> bool:
    """Tell a URL from a path."""
    return _URL.match(text) is not None


def travels(text: str) -> bool:
    """Tell whether a capture is to be one file, or stored somewhere else than in a local folder."""
    return is_remote(text) or text.endswith(ARCHIVE)


def is_archive(place: Path) -> bool:
    """Tell whether a local path is a capture in one file."""
    return place.is_file() and (place.name.endswith(ARCHIVE) or zipfile.is_zipfile(place))


def home_for(archive: Path, scratch: Path) -> Path:
    """Return where an archive is to be unpacked: the name of that folder is the name of the capture."""
    return _new_folder(scratch) / archive.name.removesuffix(ARCHIVE)


def bring(text: str, scratch: Path) -> Path:
    """Return a capture as a local folder or ZIP file; one at a URL is fetched into `scratch`."""
    if not is_remote(text):
        return Path(text)
    home = _new_folder(scratch) / (PurePosixPath(text.rstrip("/")).name or "capture")
    fs, place = open_store(text, "cannot open the place of the capture")
    with remote_errors("cannot fetch the capture", text), suppress(FileNotFoundError):
        if home.name.endswith(ARCHIVE):
            fs.get_file(place, str(home))
        else:
            files = fs.find(place)
            check_count(len(files))
            for file in files:
                relative = PurePosixPath(file).relative_to(PurePosixPath(place)).as_posix()
                if is_member(relative):
                    (home / relative).parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(file, str(home / relative))
    if not home.exists():
        raise NoCaptureError("no capture here", where=text, wanted=f"a folder with {MANIFEST}, or a ZIP file")
    return home


def refuse_to_replace(target: str) -> None:
    """Raise where the place that a capture is to be delivered to is not empty."""
    if is_remote(target):
        fs, place = open_store(target, "cannot open the place of the capture")
        with remote_errors("cannot read the place of the capture", target):
            exists = fs.exists(place)
    else:
        exists = Path(target).exists()
    if exists:
        raise already_exists(target)


def deliver(folder: Path, target: str) -> None:
    """Deliver a complete capture to a ZIP file or a URL; its commit mark arrives last."""
    if not is_remote(target):
        pack(folder, Path(target))
        return
    fs, place = open_store(target, "cannot open the place of the capture")
    packed = folder.parent / f"{uuid.uuid4().hex}{ARCHIVE}"
    try:
        with remote_errors("cannot deliver the capture", target):
            if target.endswith(ARCHIVE):
                pack(folder, packed)
                _put(fs, packed, place)
                return
            if fs.exists(place):
                fs.rm(place, recursive=True)
            for file in _files(folder):
                remote = f"{place}/{file.relative_to(folder).as_posix()}"
                fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
                fs.put_file(str(file), remote)
    finally:
        packed.unlink(missing_ok=True)


def read_bytes(place: str) -> bytes:
    """Return what is in a file, or at a URL."""
    fs, path = open_store(place, "cannot open the file")
    with remote_errors("cannot read", place):
        fs.invalidate_cache()  # a listing from before it was written
        return bytes(fs.cat_file(path))


def write_bytes(place: str, raw: bytes) -> None:
    """Write a file, or what is at a URL."""
    fs, path = open_store(place, "cannot open the file")
    with remote_errors("cannot write", place):
        fs.pipe_file(path, raw)


def open_store(url: str, what: str) -> tuple[Any, str]:
    """Return the file system of a URL or folder, and the path in it; `what` starts the error where there is none."""
    try:
        import fsspec

        fs, place = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        hint = "is the package for this protocol installed?"
        raise CaptureError(what, where=url, got=error, hint=hint) from None
    return fs, str(place)


@contextmanager
def remote_errors(what: str, where: str) -> Iterator[None]:
    """Turn any error of a remote store, each of which raises its own kinds, into one of ours."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:  # the stores of fsspec raise kinds of their own
        raise CaptureError(what, where=where, got=error) from None


def _put(fs: Any, packed: Path, place: str) -> None:
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
    if not protocols & _RENAMING:
        fs.put_file(str(packed), place)
        return
    parent, _, name = place.rpartition("/")
    partial = f"{parent}/.{name}.partial-{uuid.uuid4().hex[:8]}"
    fs.makedirs(parent, exist_ok=True)
    try:
        fs.put_file(str(packed), partial)
        fs.mv(partial, place)
    except BaseException:
        with suppress(Exception):  # each store has its own, and the first one counts
            fs.rm_file(partial)
        raise


def _files(folder: Path) -> list[Path]:
    """Return the files of a capture, its commit mark last."""
    return sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda f: (f.name == MANIFEST, f))


def pack(folder: Path, target: Path) -> None:
    """Write a ZIP file of what is in a folder, whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        with WholeFile(target) as made:
            with zipfile.ZipFile(made.file, "w") as archive:
                for file in _files(folder):
                    # tensors hardly compress, and it takes long to find that out
                    kind = zipfile.ZIP_STORED if file.suffix == ".safetensors" else zipfile.ZIP_DEFLATED
                    archive.write(file, file.relative_to(folder).as_posix(), compress_type=kind)
            made.commit()
    except OSError as error:
        raise cannot_write(target, error) from None


def _new_folder(scratch: Path) -> Path:
    folder = scratch / uuid.uuid4().hex[:8]
    folder.mkdir(parents=True)
    return folder
