"""Make the sums of a capture anew, as whoever edits one on purpose can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture.folder import MANIFEST
from consistency.capture.seal import files_of, sealed


def reseal(folder: Path) -> Path:
    """Make them anew, of those workers that are whole, and return the folder."""
    path = folder / MANIFEST
    manifest: Any = json.loads(path.read_text(encoding="utf-8"))
    infos = (folder / "workers").glob("*/worker.json")
    files = {info.parent.name: msgspec.to_builtins(files_of(info.parent)) for info in infos}
    path.write_bytes(sealed({**manifest, "files": files, "sha256": ""}))
    return folder
