"""A module around a model: whether PEFT, transformers and a trainer still find the model inside it.

Imports torch; `consistency.check_wrapped` gets here when it is asked for, not before.
"""

from __future__ import annotations

from consistency.worker.wrapper_check.check import check_wrapped
from consistency.worker.wrapper_check.report import WrapperFinding, WrapperReport

__all__ = ["WrapperFinding", "WrapperReport", "check_wrapped"]
