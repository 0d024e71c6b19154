"""Devices that should be untouched, seen where there are several: `inside_memory.py`, in one process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from .fixtures import Double

pytestmark = pytest.mark.slow

INSIDE = Path(__file__).with_name("inside_memory.py")


def test_inside(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    # freed scratch of the double's kernels goes back at once: kept by the C library, it looks like memory in use
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    done = double.python("-m", "pytest", INSIDE, "--noconftest", *plugins, "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
