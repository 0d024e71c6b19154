"""A module around a model: whether PEFT, transformers and a trainer still find the model inside it.

Imports torch; `consistency.check_wrapped` gets here when it is asked for, not before.
"""

from __future__ import annotations

from consistency.wrapping.check import check_wrapped
from consistency.wrapping.report import WrapperFinding, WrapperReport

__all__ = ["WrapperFinding", "WrapperReport", "check_wrapped"]
