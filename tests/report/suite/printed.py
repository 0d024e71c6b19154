"""A suite as a pipe, or a terminal of some width, gets it."""

from __future__ import annotations

import io
from typing import Any

from consistency.comparison.suite import SuiteResult
from consistency.report.console import make_console
from consistency.report.formats import View
from consistency.report.suite.terminal import render


def printed(found: SuiteResult, *, width: int | None = None, **options: Any) -> str:
    console = make_console(io.StringIO())
    console.width = width or console.width
    return b"".join(render(found, View(**options), console)).decode("utf-8")
