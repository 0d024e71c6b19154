"""Write a file whole or not at all: under another name in the same folder, then renamed. Standard library alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from consistency.errors import CaptureError


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file part by part, whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise CaptureError("cannot write", where=path, got=error) from None
