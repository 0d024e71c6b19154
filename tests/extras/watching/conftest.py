"""All machines judge blocks in the training, but where a test asks for a process beside it."""

from __future__ import annotations

import pytest

from consistency.extras.watching import block_turns


@pytest.fixture(autouse=True)
def no_cores_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_turns, "free_threads", lambda *_: 0)
