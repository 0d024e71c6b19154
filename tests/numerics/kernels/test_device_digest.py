"""A device's digests are believed when it gets test words right; otherwise the host computes them, and that is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistency.capture.names import DIGEST_FAULT
from consistency.numerics import digest as digest_module
from consistency.numerics.digest import _rows_on_cpu, _rows_on_device
from consistency.numerics.kernels import device_digest
from consistency.numerics.kernels.numpy_digest import ROW_BYTES
from consistency.worker import environment

CPU = torch.device("cpu")
RAW = torch.arange(5 * ROW_BYTES + 77, dtype=torch.int64).mul(2654435761).to(torch.uint8)
"""Five rows and a short one."""

SHIFT, ADDCMUL = torch.bitwise_right_shift, torch.addcmul


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be a device that has to prove itself."""
    monkeypatch.setattr(digest_module, "GPU_CHUNK_ROWS", 2)
    monkeypatch.setattr(device_digest, "_states", {})
    monkeypatch.setattr(device_digest, "_faults", {})


def as_xla_has_it(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift as torch_xla 2.9 does by `>>` with a number: towards zero."""
    return torch.div(x, 1 << bits, rounding_mode="trunc")


def saturating(high: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ADDCMUL(high, x, w).clamp(min=-(2**62))


def missing(*_: Any) -> torch.Tensor:
    raise NotImplementedError("could not run 'aten::bitwise_right_shift' on this backend\nmore of it")


def test_a_device_that_is_right_is_believed() -> None:
    assert (_rows_on_device(RAW) == _rows_on_cpu(RAW.numpy())).all()
    assert device_digest.state(CPU) == device_digest.PROVEN
    assert environment.digest_kernel(CPU) == {}


@pytest.mark.parametrize(
    ("name", "instead", "reason", "is_fault"),
    [
        ("bitwise_right_shift", as_xla_has_it, "host: the device's sums are wrong in 5 of 5 test rows", True),
        ("addcmul", saturating, "host: the device's sums are wrong in ", True),
        ("bitwise_right_shift", missing, "host: the device cannot digest: NotImplementedError: could not run", False),
    ],
)
def test_one_that_is_wrong_is_not(
    name: str, instead: Callable[..., torch.Tensor], reason: str, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, name, instead)
    assert (_rows_on_device(RAW) == _rows_on_cpu(RAW.numpy())).all()
    assert device_digest.state(CPU).startswith(reason)
    found = environment.digest_kernel(CPU)
    assert found.pop("digest_kernel") == device_digest.state(CPU)
    assert found == ({DIGEST_FAULT: device_digest.state(CPU).removeprefix("host: ")} if is_fault else {})


def test_one_whose_weights_did_not_arrive_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "_weights_on", lambda _: (torch.zeros(ROW_BYTES // 8, dtype=torch.int64),) * 2)
    assert (_rows_on_device(RAW) == _rows_on_cpu(RAW.numpy())).all()
    assert device_digest.state(CPU) == "host: test words do not come back from the device as they were sent"
    assert device_digest.fault(CPU)


def test_a_lazy_backend_runs_what_it_has_noted_before_it_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Any] = []
    monkeypatch.setattr(torch.cpu, "settle", settled.append, raising=False)
    assert (_rows_on_device(RAW) == _rows_on_cpu(RAW.numpy())).all()
    assert settled == [CPU]
