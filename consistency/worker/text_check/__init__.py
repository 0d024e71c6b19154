"""Whether a model could have written a text.

Imports torch, so `consistency.check_text` imports it on first use.
"""

from __future__ import annotations

from consistency.worker.text_check.check import check_text
from consistency.worker.text_check.report import TextReport, TextResult, TokenGap

__all__ = ["TextReport", "TextResult", "TokenGap", "check_text"]
