"""Kinds of findings of files of weights. No torch here."""

from __future__ import annotations

from consistency.comparison import kinds

ROUNDED = kinds.declare("rounded")
NAMES = kinds.declare("names")
DIFFERENCE = kinds.declare("difference")
SCALING = kinds.declare("scaling")

KINDS = (ROUNDED, NAMES, DIFFERENCE, SCALING)
