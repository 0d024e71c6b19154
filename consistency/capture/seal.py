"""Sums of the files of a capture: a file that was cut, lost or changed since is then damage, and no other result.

The sums show accidents: who changes a file on purpose can compute them again. A stored tensor has its own in its name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from consistency.capture.folder import CaptureManifest, WorkerFiles
from consistency.capture.json_codec import encode_json
from consistency.errors import CaptureError

_OWN = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n\Z')


def files_of(worker: Path) -> WorkerFiles:
    """Return the sums of a worker's files in its folder."""
    records = worker / "records.jsonl"
    raw = records.read_bytes() if records.exists() else b""
    return WorkerFiles(info=_sum((worker / "worker.json").read_bytes()), records=_sum(raw), lines=raw.count(b"\n"))


def check_files(name: str, raw: bytes, wanted: WorkerFiles, path: Path) -> None:
    """Raise CaptureError where the bytes of a worker's file are not those that were written.

    `name` is `worker.json` or `records.jsonl`.
    """
    wanted_sum = wanted.info if name == "worker.json" else wanted.records
    if _sum(raw) == wanted_sum:
        return
    lines = raw.count(b"\n")
    got = None
    if name != "worker.json" and lines != wanted.lines:
        got = f"{lines} of {wanted.lines} records"
    raise CaptureError(f"{name} was changed since it was written", where=path, got=got)


def sealed(manifest: CaptureManifest | Mapping[str, object]) -> bytes:
    """Return a manifest as JSON, with its own sum in its last field, an empty `sha256`."""
    raw = encode_json(manifest, indent=1) + b"\n"
    return raw.replace(b'"sha256": ""', b'"sha256": "' + _sum(raw).encode() + b'"')


def check_manifest(raw: bytes, path: Path) -> None:
    """Raise CaptureError where the bytes of a manifest are not those that were written."""
    match = _OWN.search(raw)
    # the sum is of the file as it was before the sum was put in
    if match is None or _sum(raw.replace(match[1], b"")).encode() != match[1]:
        raise CaptureError(f"{path.name} was changed since it was written", where=path)


def _sum(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
