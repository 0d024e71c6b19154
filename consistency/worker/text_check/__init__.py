"""Whether a model could have written a text.

Imports torch, so `consistency.check_text` imports it on first use.
"""

from __future__ import annotations

from consistency.worker.text_check.check import check_text
from consistency.worker.text_check.report import TextReport, TextResult, TokenGap
from consistency.worker.text_check.texts import Text

__all__ = ["Text", "TextReport", "TextResult", "TokenGap", "check_text"]
