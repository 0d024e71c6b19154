"""How a child process runs this package: the same interpreter, the same code."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def python_command() -> list[str]:
    """Return the start of a command that runs a module of this package with this very interpreter.

    `-P` keeps the working directory off the module path: a user's `json.py` must not become the worker's.
    """
    return [sys.executable, "-P", "-m"]


def python_path() -> dict[str, str]:
    """Return a `PYTHONPATH` under which a child finds this package; nothing where the package is installed."""
    if _PACKAGE_ROOT.name in ("site-packages", "dist-packages"):
        return {}
    paths = [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
