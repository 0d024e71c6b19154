"""Read captures from folders, ZIP files or URLs, one archive unpacked at a time.

The records of one are unpacked, read and deleted before those of the next; tensors stay in the archive until two of
them are compared.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from consistency.capture.archive import unpack
from consistency.capture.folder import Capture
from consistency.capture.reader import RecordPool, read_capture
from consistency.capture.transport import bring, home_for, is_archive


def read_sent(text: str, scratch: Path, pool: RecordPool | None = None) -> Capture:
    """Read a capture: a folder, a ZIP file, or a URL of either.

    Its tensors can be read as long as `scratch` is there, into which they are unpacked, and the ZIP file.

    Raises
    ------
    CaptureError
        It cannot be fetched, unpacked or read.
    """
    place = bring(text, scratch)
    if not is_archive(place):
        return read_capture(place, pool)
    home = home_for(place, scratch)
    try:
        unpack(place, home)
        return msgspec.structs.replace(read_capture(home, pool), archive=place)
    finally:
        shutil.rmtree(home, ignore_errors=True)
