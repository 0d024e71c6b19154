"""What tests of extras share with others: small models on disk, a session in this process, and a browser."""

from __future__ import annotations

from tests.report.conftest import browser, open_page
from tests.worker.conftest import _seeded, llama, look, masked_bert, told

__all__ = ["_seeded", "browser", "llama", "look", "masked_bert", "open_page", "told"]
