"""A capture or a file of records, read as a whole."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from consistency.capture.archive import take_out, unpack
from consistency.capture.bounded import BoundedReader
from consistency.capture.reader import RecordPool, read_parts
from consistency.capture.records import TensorRecord
from consistency.capture.transport import bring, home_for, is_archive


def read_records(path: Path) -> Iterator[TensorRecord]:
    """Yield the records of a worker."""
    for part in read_parts(path, RecordPool(), BoundedReader(None)):
        yield from part


def fetch(text: str, scratch: Path) -> Path:
    """Return a capture as a local folder, with its tensors."""
    place = bring(text, scratch)
    if not is_archive(place):
        return place
    home = home_for(place, scratch)
    unpack(place, home)
    for name in zipfile.ZipFile(place).namelist():
        if name.endswith(".safetensors") and ".." not in name:
            take_out(place, home / name)
    return home
