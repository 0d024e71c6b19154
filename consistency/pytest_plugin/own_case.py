"""The case of a test of one's own: checked once per pytest session, whichever process of xdist needs it first."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.whole_file import write_whole
from consistency.comparison.result import Comparison
from consistency.pytest_plugin.failed_run import leaving_its_error, raise_error, without_stack
from consistency.pytest_plugin.given import by_attribute
from consistency.pytest_plugin.session import Session
from consistency.workflows.api import run

_MARKER = "consistency"


def marked_options(node: pytest.Item) -> dict[str, Any]:
    """Return the options of the markers of a test; those nearest to it win."""
    found: dict[str, Any] = {}
    for marker in reversed(list(node.iter_markers(_MARKER))):
        if marker.args:
            pytest.fail(f"@pytest.mark.consistency takes options by name, got {marker.args[0]!r}", pytrace=False)
        found |= by_attribute(marker.kwargs)
    return found


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the pytest session that all processes of xdist share."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "consistency"
    folder.mkdir(exist_ok=True)
    return folder


def without_items(config: pytest.Config, folder: Path) -> Session:
    """Return a session whose cases have no items, for fixtures alone."""
    home = folder / "session"
    home.mkdir(exist_ok=True)
    with without_stack():
        return Session.of(config, home)


def own_comparison(options: Mapping[str, Any], folder: Path) -> Comparison:
    """Return the comparison of a case; run its devices if nobody has yet."""
    from filelock import FileLock

    if not options.get("base") and not options.get("adapter"):
        pytest.fail("the test names no model: give base or adapter to @pytest.mark.consistency", pytrace=False)
    key = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:16]
    path, error = folder / f"{key}.json", folder / f"{key}.error.json"
    with without_stack(), FileLock(folder / f"{key}.lock"):
        raise_error(error)
        if not path.exists():
            with leaving_its_error(error):
                write_whole(path, [encode_json(run(**options).comparison)])
    return decode_json(path.read_bytes(), Comparison)
