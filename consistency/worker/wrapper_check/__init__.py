"""Check a wrapper around a model: whether PEFT, transformers and trainers still find the model inside it.

Imports torch, so `consistency.check_wrapped` imports it on first use.
"""

from __future__ import annotations

from consistency.worker.wrapper_check.check import check_wrapped
from consistency.worker.wrapper_check.report import WrapperFinding, WrapperReport

__all__ = ["WrapperFinding", "WrapperReport", "check_wrapped"]
