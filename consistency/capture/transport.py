"""Captures as one file (`host-a.zip`), or at any URL that fsspec supports: fetched from there and delivered there.

A ZIP file holds a capture's files under their names and nothing else. What has another name is not unpacked, so a
stranger's archive can write nowhere but into the folder that is made for it.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from consistency.capture.folder import MANIFEST
from consistency.capture.writer import cannot_write, in_the_way
from consistency.errors import CaptureError

ARCHIVE = ".zip"
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://|^[A-Za-z0-9]+::")
_MEMBER = re.compile(
    r"^(?:captures/)?(?:capture\.json|workers/[A-Za-z0-9][\w.@+-]{0,120}/[\w.-]+\.(?:json|jsonl|txt)"
    r"|blobs/[0-9a-f]{64}\.safetensors)$"
)
_SPARE_BYTES = 2**28  # what unpacking has to leave free on the disk


def is_remote(text: str) -> bool:
    """Tell a URL from a path."""
    return _URL.match(text) is not None


def travels(text: str) -> bool:
    """Tell whether a capture is to be one file, or stored somewhere else than in a local folder."""
    return is_remote(text) or text.endswith(ARCHIVE)


def fetch(text: str, scratch: Path) -> Path:
    """Return a capture as a local folder, with the name that it has where it is stored.

    A folder is returned as it is; a ZIP file, or a URL of either, is unpacked or fetched into `scratch`.
    """
    if not is_remote(text):
        path = Path(text)
        return _unpacked(path, scratch) if path.is_file() and zipfile.is_zipfile(path) else path
    home = _new_folder(scratch) / (PurePosixPath(text.rstrip("/")).name or "capture")
    fs, place = open_store(text, "cannot open the place of the capture")
    with remote_errors("cannot fetch the capture", text):
        if home.name.endswith(ARCHIVE):
            fs.get_file(place, str(home))
        else:
            for file in fs.find(place):
                relative = PurePosixPath(file).relative_to(PurePosixPath(place)).as_posix()
                if _MEMBER.fullmatch(relative):
                    (home / relative).parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(file, str(home / relative))
    if home.name.endswith(ARCHIVE):
        return _unpacked(home, scratch)
    if not home.exists():
        raise CaptureError("no capture here", where=text, wanted=f"a folder with {MANIFEST}")
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
        raise in_the_way(target)


def deliver(folder: Path, target: str) -> None:
    """Deliver a complete capture to a ZIP file or a URL; its commit mark arrives last."""
    if not is_remote(target):
        _pack(folder, Path(target))
        return
    fs, place = open_store(target, "cannot open the place of the capture")
    packed = folder.parent / f"{uuid.uuid4().hex}{ARCHIVE}"
    try:
        with remote_errors("cannot deliver the capture", target):
            if target.endswith(ARCHIVE):
                _pack(folder, packed)
                fs.put_file(str(packed), place)
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


def _files(folder: Path) -> list[Path]:
    """Return the files of a capture, its commit mark last."""
    return sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda f: (f.name == MANIFEST, f))


def _pack(folder: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w") as archive:
            for file in _files(folder):
                # tensors hardly compress, and it takes long to find that out
                kind = zipfile.ZIP_STORED if file.suffix == ".safetensors" else zipfile.ZIP_DEFLATED
                archive.write(file, file.relative_to(folder).as_posix(), compress_type=kind)
        os.replace(partial, target)
    except OSError as error:
        raise cannot_write(target, error) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _unpacked(path: Path, scratch: Path) -> Path:
    home = _new_folder(scratch) / path.name.removesuffix(ARCHIVE)
    try:
        home.mkdir()
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if _MEMBER.fullmatch(member.filename)]
            size = sum(member.file_size for member in members)
            if size > shutil.disk_usage(home).free - _SPARE_BYTES:
                raise CaptureError("no room to unpack the capture", where=path, got=f"{size / 2**30:.1f} GiB")
            for member in members:
                archive.extract(member, home)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise CaptureError("cannot unpack the capture", where=path, got=error) from None
    return home


def _new_folder(scratch: Path) -> Path:
    folder = scratch / uuid.uuid4().hex[:8]
    folder.mkdir(parents=True)
    return folder
