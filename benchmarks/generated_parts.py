"""The parts of a page in `docs/` that a benchmark generates: between two marks, so that the prose around them stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def replaced(page: str, name: str, text: str) -> str:
    """Put a generated part between its marks on the page."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no marks {begin} … {end}")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def show(parts: Mapping[str, str], page: Path, *, write: bool) -> None:
    """Print the parts, or put each of them into the page."""
    if not write:
        print("\n\n".join(parts.values()))
        return
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = replaced(text, name, part)
    page.write_text(text, encoding="utf-8")
