"""Read captures from folders, ZIP files or URLs, one archive unpacked at a time.

The records of one archive are unpacked, read and deleted before those of the next; tensors stay in the archive until
two of them are compared.
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

    Its tensors can be read as long as the ZIP file is there, and `scratch`, into which they are unpacked.

    Raises
    ------
    CaptureError
        It cannot be fetched, unpacked or read.
    """
    path = bring(text, scratch)
    if not is_archive(path):
        return read_capture(path, pool)
    home = home_for(path, scratch)
    try:
        unpack(path, home)
        return msgspec.structs.replace(read_capture(home, pool), archive=path)
    finally:
        shutil.rmtree(home, ignore_errors=True)
