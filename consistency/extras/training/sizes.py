"""The number of steps that the stages of a group train. No torch here."""

from __future__ import annotations

STEPS = 3
"""Three: from the second step on the optimizer has moments, and the third uses these again."""
