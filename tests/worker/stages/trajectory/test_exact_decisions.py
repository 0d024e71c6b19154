"""Decisions of one pass are those of the next, whatever its own operands say."""

from __future__ import annotations

import torch

from consistency.worker.decisions.replay import deciding
from consistency.worker.stages.trajectory.exact_decisions import ExactDecisions


def test_a_pass_that_would_decide_otherwise_follows() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0, -1.0]])
    decisions = ExactDecisions()
    with deciding(decisions.remember(), gradient=True):
        chosen = torch.topk(x, 2).indices
    assert len(decisions.digests) == 1
    with deciding(decisions.follow(), gradient=True):
        followed = torch.topk(-x, 2).indices
    assert torch.equal(followed, chosen)
    with deciding(decisions.follow(), gradient=True):
        other = torch.topk(-x, 3).indices
    assert other.shape == (1, 3), "an operation of another shape decides for itself"


def test_a_pass_that_is_begun_anew_is_remembered_once() -> None:
    decisions = ExactDecisions()
    for _ in range(2):
        with deciding(decisions.remember(), gradient=True):
            torch.topk(torch.tensor([1.0, 2.0]), 1)
    assert len(decisions.digests) == 1


def test_a_pass_without_decisions_leaves_nothing_to_follow() -> None:
    decisions = ExactDecisions()
    with deciding(decisions.remember(), gradient=True):
        torch.ones(3).add(1)
    assert decisions.follow() is None
