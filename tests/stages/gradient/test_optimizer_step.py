"""The optimizer's step of a parameter of any size, a piece at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consistency.numerics.file_tensor import elements_of
from consistency.numerics.kernels.numpy_digest import BLOCK_BYTES
from consistency.stages.gradient import optimizer_step
from consistency.worker.memory.host_memory import peak_bytes, reset_peak
from consistency.worker.training import adamw


def test_pieces_are_whole_blocks_of_a_digest_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert optimizer_step.PIECE * dtype.itemsize % BLOCK_BYTES == 0


def test_a_step_in_pieces_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, gradients = torch.randn(7, 31), torch.randn(7, 31)
    monkeypatch.setattr(optimizer_step, "PIECE", 50)
    monkeypatch.setattr(optimizer_step, "PART", 20)
    gradient = elements_of(gradients)
    pieces = list(optimizer_step.pieces(parameter.numel()))
    assert [piece.stop - piece.start for piece in pieces] == [50, 50, 50, 50, 17]
    found = torch.cat([optimizer_step.stepped(parameter.view(-1)[p], gradient(p)) for p in pieces])
    assert torch.equal(found.view(7, 31), adamw.step(parameter, gradients))
    elements = elements_of(found), elements_of(parameter), gradient
    stretches = list(optimizer_step._exact_stretches(*elements, parameter.numel(), None))
    assert [stretch.start for stretch in stretches] == [0, 20, 40, 50, 70, 90, 100, 120, 140, 150, 170, 190, 200]
    assert sum(len(stretch.value) for stretch in stretches) == parameter.numel()
    for stretch in stretches:
        assert stretch.size is not None
        assert (abs(stretch.actual.double().numpy() - stretch.value) <= stretch.size).all()


class Recorded:
    """What the stage hands to its recorder."""

    def __init__(self, *, reads: bool = True) -> None:
        self.given: list[dict[str, Any]] = []
        self._reads = reads

    def tolerance(self, **_: object) -> None:
        return None

    def computed(self, _: object, actual: torch.Tensor, **given: Any) -> None:
        read = {"actual": actual.clone(), "chunks": list(given["chunks"]())} if self._reads else {}
        self.given.append({**given, **read})

    def skipped(self, _: object, reason: str, *__: object, **___: object) -> None:
        self.given.append({"skipped": reason})


def recorded(tmp_path: Path, parameter: torch.Tensor, gradient: torch.Tensor, *, reads: bool = True) -> dict[str, Any]:
    record, case = Recorded(reads=reads), SimpleNamespace(repeat=2)
    context: Any = SimpleNamespace(
        model=SimpleNamespace(get_parameter=lambda _: parameter), record=record, job=SimpleNamespace(case=case),
        scratch=tmp_path,
    )  # fmt: skip
    optimizer_step.record_step(context, "x", "layer", "x.updated", gradient)
    (given,) = record.given
    return given


@pytest.mark.parametrize("shape", [(7, 31), (5,), (), (0, 3)])
def test_the_parameter_after_the_step_is_recorded(
    tmp_path: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_step, "PIECE", 50)
    parameter, gradient = torch.randn(shape), torch.randn(shape)
    given = recorded(tmp_path, parameter, gradient)
    expected = adamw.step(parameter, gradient)
    assert torch.equal(given["actual"], expected)
    # blocks of a digest end where pieces do, which are shorter here
    assert given["digests"][0].value == given["digests"][1].value
    assert given["measure"].elements == parameter.numel()
    assert parameter.numel() == 0 or 0 < given["measure"].ratio <= 1
    before = torch.cat([torch.empty(0), *(chunk.base for chunk in given["chunks"])])
    assert torch.equal(before, parameter.reshape(-1))
    assert not list(tmp_path.iterdir()), "the scratch file is gone"


def test_a_gradient_that_is_not_finite_anywhere_gives_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "PIECE", 50)
    gradient = torch.ones(200)
    gradient[170] = torch.inf
    assert recorded(tmp_path, torch.ones(200), gradient).keys() == {"skipped"}


def test_a_step_that_divides_by_zero_on_any_device_is_not_judged(tmp_path: Path) -> None:
    """In float16 AdamW's ε is zero, and so are the squares of small gradients."""
    parameter, gradients = torch.ones(3, dtype=torch.float16), torch.tensor([0.5, -0.5, 1.0], dtype=torch.float16)
    assert "measure" in recorded(tmp_path, parameter, gradients)
    gradients[1] = 0.0
    assert not adamw.step(parameter, gradients).isfinite().all()
    given = recorded(tmp_path, parameter, gradients)
    assert given["skipped"] == "AdamW's ε is 0 in float16: its step divides small gradients by zero"
    assert "measure" in recorded(tmp_path, parameter.bfloat16(), gradients.bfloat16())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can restart the high-water mark")
def test_a_step_takes_no_memory_for_the_whole_parameter(tmp_path: Path) -> None:
    """Neither for its exact value, nor the result."""

    def taken(rows: int) -> int:
        gradient, parameter = torch.ones(rows, 1 << 10), torch.ones(rows, 1 << 10)
        reset_peak()
        before = peak_bytes()
        given = recorded(tmp_path, parameter, gradient, reads=False)
        assert given["measure"].elements == parameter.numel()
        return peak_bytes() - before

    taken(1 << 11)  # the first step reads code of libraries, which counts as resident
    assert taken(1 << 14) < 64 * 2**20, "less than the parameter: either takes as much, beside the pieces"
