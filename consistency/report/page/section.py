"""A section of a run's page that a plug-in adds (`consistency.plugins.Plugin.sections`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from consistency.comparison.result import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """One section of the page.

    Attributes
    ----------
    package : str
        Where its template is.
    template : str
        Name of the file: HTML with what `values` returns, in Jinja's language.
    values : callable
        What the template shows of a comparison, by name; nothing where the page has no such section.
    """

    package: str
    template: str
    values: Callable[[Comparison], Mapping[str, Any]]


def numbers(curve: Mapping[str, Any], figure: str) -> list[float | None]:
    """Return a figure of every step; what is no finite number is None, for a capture may come from a stranger."""
    values = curve.get(figure)
    if not isinstance(values, (list, tuple)):
        return []
    return [float(v) if isinstance(v, (int, float)) and math.isfinite(v) else None for v in values]
