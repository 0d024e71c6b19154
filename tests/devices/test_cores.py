"""How many processors there are to share out."""

from __future__ import annotations

import pytest

from consistency.devices import cores
from consistency.devices.cores import threads_per_worker


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    assert [threads_per_worker(n) for n in (1, 2, 3, 8, 9, 0)] == [8, 4, 2, 1, 1, 8]
