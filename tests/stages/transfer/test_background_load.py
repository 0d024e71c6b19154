"""A lazy backend is used from one thread: work is queued before the copies, and these are made in turn."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

from consistency.stages.transfer import background_load
from consistency.stages.transfer.background_load import all_at_once, under_load

CPU = torch.device("cpu")


def calls_of(devices: list[torch.device]) -> list[tuple[int, threading.Thread]]:
    done: list[tuple[int, threading.Thread]] = []

    def call(number: int) -> None:
        done.append((number, threading.current_thread()))

    with under_load(devices):
        all_at_once([functools.partial(call, number) for number in range(4)], devices)
    return done


def test_a_lazy_backend_gets_all_from_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Any] = []
    monkeypatch.setattr(background_load, "_settle_of", lambda _: settled.append)
    threads = threading.active_count()
    with under_load([CPU, CPU]):
        assert threading.active_count() == threads
    assert settled == [CPU]
    assert calls_of([CPU]) == [(number, threading.current_thread()) for number in range(4)]


def test_another_backend_gets_its_copies_from_threads_beside_the_work() -> None:
    done = calls_of([CPU])
    assert sorted(number for number, _ in done) == [0, 1, 2, 3]
    assert threading.current_thread() not in {thread for _, thread in done}
