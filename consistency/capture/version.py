"""The version of this package: it is in every capture and report."""

from __future__ import annotations

__version__ = "0.1.0"
