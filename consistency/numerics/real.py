"""A floating-point number that can stand in a report."""

from __future__ import annotations


class Real(float):
    """A float64 that survives JSON: NaN and the infinities are written as `"nan"`, `"inf"`, `"-inf"`."""

    __slots__ = ()
