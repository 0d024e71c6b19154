"""The report as a pipe, or a terminal of some width, gets it."""

from __future__ import annotations

import io
from typing import Any

from consistency.comparison.result import Comparison
from consistency.report.console import make_console
from consistency.report.formats import View
from consistency.report.terminal import render


def printed(found: Comparison, *, width: int | None = None, **options: Any) -> str:
    console = make_console(io.StringIO())
    console.width = width or console.width
    return b"".join(render(found, View(**options), console)).decode("utf-8")
