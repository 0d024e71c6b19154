"""The reference pages of `docs/`, made from the code that they describe.

python -m benchmarks.reference_pages             # print them
python -m benchmarks.reference_pages --write     # into docs/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.reference_pages import api, capture_format, commands, options, report_format

DOCS = Path(__file__).parents[2] / "docs"

PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "options.md": options.page,
    "report-format.md": report_format.page,
    "capture-format.md": capture_format.page,
    "api.md": api.page,
}
"""By file name."""

_MADE = "<!-- made by: python -m benchmarks.reference_pages --write -->\n\n"


def text_of(name: str) -> str:
    """Return the contents of a page."""
    return f"{_MADE}{PAGES[name]().rstrip()}\n"
