"""The load on a device: it runs, is counted, and ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from consistency.extras.operations.soak import load
from consistency.extras.operations.soak.load import busy


def test_products_are_made_and_counted() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with busy(torch.device("cpu")) as found:
        assert found.products > 0
        assert "load" in {thread.name for thread in threading.enumerate()}
    told = found.summary()
    assert told.products >= 256
    assert told.products_per_s > 0
    assert told.error is None
    assert "load" not in {thread.name for thread in threading.enumerate()}
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_load_that_fails_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(np, "matmul", fails)
    with busy(torch.device("cpu")) as found:
        pass
    assert found.summary().error == "the load ended: MemoryError: no room"


def test_an_error_of_the_device_is_not_the_loads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    def fails(*_: object, **__: object) -> None:
        raise lost

    monkeypatch.setattr(np, "matmul", fails)
    with pytest.raises(torch.AcceleratorError, match="ECC"), busy(torch.device("cpu")):
        pass


def test_a_device_gets_products_that_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides double until a product takes long enough; the CPU stands for a device here."""
    plain = SimpleNamespace(synchronize=lambda: None)  # a backend without streams
    monkeypatch.setattr(torch, "get_device_module", lambda _: plain)
    monkeypatch.setattr(load, "_SMALLEST_SIDE", 8)
    monkeypatch.setattr(load, "LARGEST_SIDE", 32)
    monkeypatch.setattr(load, "_FULL_S", 3600.0)
    state = load.Busy()
    assert load._multiply_on_accelerator(torch.device("cpu"), state)() == 4
    assert state.size == "32 × 32 float32"
