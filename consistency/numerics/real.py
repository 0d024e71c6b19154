"""A floating-point number that survives JSON."""

from __future__ import annotations


class Real(float):
    """A float64 that survives JSON: NaN and the infinities are written as `"nan"`, `"inf"`, `"-inf"`."""

    __slots__ = ()
