"""The report as a pipe, or a terminal of some width, gets it, and what a tracker shows of it."""

from __future__ import annotations

import io
import re
from typing import Any

from consistency.comparison.result import Comparison
from consistency.comparison.suite import SuiteResult
from consistency.report.console import make_console
from consistency.report.formats import View
from consistency.report.html import as_html
from consistency.report.markdown import as_markdown
from consistency.report.terminal import render


def printed(found: Comparison | SuiteResult, *, width: int | None = None, **options: Any) -> str:
    console = make_console(io.StringIO())
    console.width = width or console.width
    return b"".join(render(found, View(**options), console)).decode("utf-8")


def suite_as_html(found: SuiteResult, folder: str | None = None) -> str:
    return as_html(found, View(folder=folder))


def suite_as_markdown(found: SuiteResult, folder: str | None = None) -> str:
    return as_markdown(found, View(folder=folder))


def visible(markdown: str) -> list[str]:
    """Return the lines that are not folded."""
    return re.sub("<details>.*?</details>", "", markdown, flags=re.DOTALL).splitlines()
