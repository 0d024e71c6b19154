"""The optimizer's step of a parameter of any size, a piece at a time."""

from __future__ import annotations

import pytest
import torch

from consistency.numerics.kernels.numpy_digest import BLOCK_BYTES
from consistency.worker.stages import adamw
from consistency.worker.stages.gradient import optimizer_step


def test_pieces_are_whole_blocks_of_a_digest_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert optimizer_step.PIECE * dtype.itemsize % BLOCK_BYTES == 0


def test_a_step_in_pieces_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, gradient = torch.randn(7, 31), torch.randn(7, 31)
    monkeypatch.setattr(optimizer_step, "PIECE", 50)
    pieces = list(optimizer_step._pieces(parameter.numel()))
    assert [piece.stop - piece.start for piece in pieces] == [50, 50, 50, 50, 17]
    found = torch.cat([optimizer_step.stepped(parameter.view(-1)[p], gradient.view(-1)[p]) for p in pieces])
    assert torch.equal(found.view(7, 31), adamw.step(parameter, gradient))
    after = found.view(7, 31).reshape(-1)
    stretches = list(optimizer_step._exact(after, parameter.view(-1), gradient.view(-1), None))
    assert [stretch.start for stretch in stretches] == [0, 50, 100, 150, 200]
    for stretch in stretches:
        assert stretch.size is not None
        assert (abs(stretch.actual.double().numpy() - stretch.value) <= stretch.size).all()
