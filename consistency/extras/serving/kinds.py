"""Kinds of findings of texts, and of inference engines. No torch here."""

from __future__ import annotations

from consistency.comparison import kinds

UNDECIDED_TEXT = kinds.declare("undecided-text")
BATCH_VARIANT = kinds.declare("batch-variant")
PART_COMPARED = kinds.declare("part-compared")

KINDS = (UNDECIDED_TEXT, BATCH_VARIANT, PART_COMPARED)
