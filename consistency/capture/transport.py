"""Captures on the road: as one file (`box-a.zip`), or at any URL that fsspec knows, brought here and sent there.

A ZIP file holds a capture's files under their names and nothing else: what has another name is not unpacked, so a
stranger's archive can write nowhere but into the folder that is made for it.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from consistency.capture.folder import MANIFEST
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
    """Tell whether a capture is to be one file, or to lie somewhere else than in a local folder."""
    return is_remote(text) or text.endswith(ARCHIVE)


def fetch(text: str, scratch: Path) -> Path:
    """Return a capture as a local folder, named as it is where it lies.

    Parameters
    ----------
    text : str
        A folder, which is returned as it is; a ZIP file; or a URL of either.
    scratch : Path
        Folder to unpack into, where that is needed.

    Raises
    ------
    CaptureError
        It cannot be fetched or unpacked.
    """
    if not is_remote(text):
        path = Path(text)
        return _unpacked(path, scratch) if path.is_file() and zipfile.is_zipfile(path) else path
    name = PurePosixPath(text.rstrip("/")).name or "capture"
    home = _new_folder(scratch)
    fs, place = _open(text)
    try:
        if name.endswith(ARCHIVE):
            fs.get_file(place, str(home / name))
        else:
            for file in fs.find(place):
                relative = PurePosixPath(file).relative_to(PurePosixPath(place)).as_posix()
                if _MEMBER.fullmatch(relative):
                    target = home / name / relative
                    target.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(file, str(target))
    except Exception as error:  # whatever a remote store raises
        raise CaptureError("cannot fetch the capture", where=text, got=error) from None
    if name.endswith(ARCHIVE):
        return _unpacked(home / name, scratch)
    if not (home / name).exists():
        raise CaptureError("no capture here", where=text, wanted=f"a folder with {MANIFEST}")
    return home / name


def refuse_to_replace(target: str) -> None:
    """Raise where there is something at the place that a capture is to be sent to."""
    if is_remote(target):
        fs, place = _open(target)
        try:
            there = fs.exists(place)
        except Exception as error:  # whatever a remote store raises
            raise CaptureError("cannot look at the place of the capture", where=target, got=error) from None
    else:
        there = Path(target).exists()
    if there:
        raise CaptureError(
            "there is something in the place of the new capture",
            where=target,
            hint="choose another --out, or give --force to replace it",
        )


def deliver(folder: Path, target: str) -> None:
    """Send a capture to where it is to lie; its commit mark arrives last.

    Parameters
    ----------
    folder : Path
        A capture, whole.
    target : str
        A ZIP file or a URL.
    """
    archive = target.endswith(ARCHIVE)
    if not is_remote(target):
        _pack(folder, Path(target))
        return
    fs, place = _open(target)
    packed = folder.parent / f"{uuid.uuid4().hex}{ARCHIVE}"
    try:
        if archive:
            _pack(folder, packed)
            fs.put_file(str(packed), place)
            return
        if fs.exists(place):
            fs.rm(place, recursive=True)
        for file in _files(folder):
            remote = f"{place}/{file.relative_to(folder).as_posix()}"
            fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(file), remote)
    except CaptureError:
        raise
    except Exception as error:  # whatever a remote store raises
        raise CaptureError("cannot send the capture", where=target, got=error) from None
    finally:
        packed.unlink(missing_ok=True)


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, place = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise CaptureError(
            "cannot open the place of the capture",
            where=url,
            got=error,
            hint="is the package of its protocol installed?",
        ) from None
    return fs, str(place)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a capture, its commit mark last."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    yield from (file for file in files if file.name != MANIFEST)
    yield from (file for file in files if file.name == MANIFEST)


def _pack(folder: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in _files(folder):
                # random bits do not get smaller, and take long to find that out
                kind = zipfile.ZIP_STORED if file.suffix == ".safetensors" else zipfile.ZIP_DEFLATED
                archive.write(file, file.relative_to(folder).as_posix(), compress_type=kind)
        os.replace(partial, target)
    except OSError as error:
        raise CaptureError("cannot write the capture", where=target, got=error) from None
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
                target = home / member.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise CaptureError("cannot unpack the capture", where=path, got=error) from None
    return home


def _new_folder(scratch: Path) -> Path:
    folder = scratch / uuid.uuid4().hex[:8]
    folder.mkdir(parents=True)
    return folder
