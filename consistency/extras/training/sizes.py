"""How long the stages of a group train. No torch here."""

from __future__ import annotations

STEPS = 3
"""With the second step the optimizer has moments, with the third these are used again."""
