"""What tests of stages share with those of the worker: small models on disk, and a session in this process."""

from __future__ import annotations

from tests.worker.conftest import _seeded, llama, look, masked_bert, told

__all__ = ["_seeded", "llama", "look", "masked_bert", "told"]
