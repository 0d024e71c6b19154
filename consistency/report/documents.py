"""The document of whatever was checked."""

from __future__ import annotations

from consistency.comparison.result import Comparison
from consistency.comparison.suite import SuiteResult
from consistency.report.document import Document
from consistency.report.formats import View
from consistency.report.of_comparison import of_comparison
from consistency.report.of_suite import of_suite


def document_of(found: Comparison | SuiteResult, view: View) -> Document:
    """Return what the formats for people say of a run, of compared captures, or of a suite."""
    return of_suite(found, view) if isinstance(found, SuiteResult) else of_comparison(found, view)
