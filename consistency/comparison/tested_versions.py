"""The newest versions that were tested: those of the table in `docs/supported-versions.md`. No torch here.

`python -m benchmarks.versions --write` makes the table, of what was run; a wheel has the page beside this module.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("torch", "transformers", "peft")

Release = tuple[int, int]
"""The first two numbers of a version."""

_PAGE = "supported-versions.md"
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def release_of(version: str) -> Release | None:
    """Return the first two numbers of a version; None of a text that does not begin with them."""
    match = _RELEASE.match(version)
    return None if match is None else (int(match[1]), int(match[2]))


@functools.cache
def newest_tested() -> Mapping[str, Release]:
    """Return the newest tested version of each of `PACKAGES`; nothing where the page is not installed."""
    module = Path(__file__).resolve()
    for page in (module.with_name(_PAGE), module.parents[2] / "docs" / _PAGE):
        if page.exists():
            return _newest_in(page.read_text(encoding="utf-8"))
    return {}


def _newest_in(text: str) -> dict[str, Release]:
    """Return the newest version of each package in the table whose heading names them."""
    newest: dict[str, Release] = {}
    titles: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if set(PACKAGES) <= set(cells):
            titles = cells
        elif not line.startswith("|"):
            titles = []
        for title, cell in zip(titles, cells, strict=False):
            release = release_of(cell)
            if title in PACKAGES and release is not None:
                newest[title] = max(release, newest.get(title, release))
    return newest
