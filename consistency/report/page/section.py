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
        Package that its template is in.
    template : str
        Name of the file: HTML in Jinja's language, with the names that `values` returns.
    values : callable
        Function from a comparison to the values that the template shows, by name; empty where the page has no such
        section.
    """

    package: str
    template: str
    values: Callable[[Comparison], Mapping[str, Any]]


def numbers(curve: Mapping[str, Any], figure: str) -> list[float | None]:
    """Return a figure of every step; None where it is no finite number, for a capture may come from a stranger."""
    values = curve.get(figure)
    if not isinstance(values, (list, tuple)):
        return []
    return [_finite_number(value) for value in values]


def _finite_number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
