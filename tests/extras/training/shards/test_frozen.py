"""Weights that nobody trains: a wrong gather is recorded by the rank that got it, and names the rank that sent it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consistency.extras.training.ranks.parts import RankPart
from consistency.extras.training.shards import frozen
from consistency.extras.training.shards.frozen import FrozenGathered


class Facts:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def fact(self, stage: str, layer: str, tensor: str, **fields: Any) -> None:
        self.rows.append({"stage": stage, "layer": layer, "tensor": tensor, **fields})


@pytest.fixture
def facts() -> Facts:
    return Facts()


@pytest.fixture
def gathered(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> tuple[FrozenGathered, torch.Tensor]:
    """Return what watches a linear layer whose weight two ranks hold by halves, and that weight."""

    def by_halves(tensor: torch.Tensor, *, rank: int, world: int) -> RankPart:
        rows = len(tensor) // world
        return RankPart(whole=tuple(tensor.shape), dim=0, start=rank * rows, stop=(rank + 1) * rows)

    monkeypatch.setattr(frozen, "part_of", by_halves)
    layer = torch.nn.Linear(4, 6)
    model = torch.nn.Sequential(layer)
    context: Any = SimpleNamespace(model=model, record=facts)
    ranks: Any = SimpleNamespace(world=2, names=("cpu", "cpu@baseline"))
    return FrozenGathered(context, ranks, model, {"0.bias"}), layer.weight.detach()


def test_a_right_gather_is_no_row(gathered: tuple[FrozenGathered, torch.Tensor], facts: Facts) -> None:
    watched, weight = gathered
    watched.see(0, "0.weight", weight.clone())
    watched.see(0, "0.bias", torch.zeros(6))  # trained: that is another check
    assert watched.record()
    assert not facts.rows


def test_the_sender_of_a_wrong_part_is_named(gathered: tuple[FrozenGathered, torch.Tensor], facts: Facts) -> None:
    watched, weight = gathered
    wrong = weight.clone()
    wrong[3:] = 0
    watched.see(0, "0.weight", wrong)
    watched.see(1, "0.weight", weight.clone())  # right again
    assert not watched.record()
    (row,) = facts.rows
    assert (row["stage"], row["layer"], row["tensor"], row["status"]) == ("shards", "0", "weight.gathered", "outside")
    assert row["evidence"]["sent_by"] == ["cpu@baseline"]
    assert row["reason"] == "in step 1 a gather of weights gave this rank other values than cpu@baseline holds"
