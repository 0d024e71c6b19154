"""Which operations decide, how far each was from deciding otherwise, and the result if it had."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistency.numerics.decision import Decision, gaps
from consistency.numerics.decisions import DecisionMode
from consistency.numerics.exact import Float64Mode

X = torch.tensor([-2.5, -0.75, 0.25, 1.5])
HALF = torch.tensor([0.5])
F = torch.nn.functional


def seen(run: Callable[[], object], *, gradient: bool = False) -> list[Decision]:
    found: list[Decision] = []
    with DecisionMode(found.append, gradient=gradient):
        run()
    return found


def forced(run: Callable[[], torch.Tensor], wanted: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
    with DecisionMode(lambda _: wanted, gradient=gradient):
        return run()


@pytest.mark.parametrize(
    ("run", "decided", "margins"),
    [
        (lambda: X > 0.5, [0, 0, 0, 1], [3.0, 1.25, 0.25, 1.0]),
        (lambda: X.le(torch.tensor(0.25)), [1, 1, 1, 0], [2.75, 1.0, 0.0, 1.25]),
        (lambda: X.round(), [-2, -1, 0, 2], [0.0, 0.25, 0.25, 0.0]),
        (lambda: X.floor(), [-3, -1, 0, 1], [0.5, 0.25, 0.25, 0.5]),
        (lambda: X.trunc(), [-2, 0, 0, 1], [0.5, 0.25, 0.75, 0.5]),
        (lambda: X.to(torch.int64), [-2, 0, 0, 1], [0.5, 0.25, 0.75, 0.5]),
        (lambda: X.sign(), [-1, -1, 1, 1], [2.5, 0.75, 0.25, 1.5]),
        (lambda: X.signbit(), [1, 1, 0, 0], [2.5, 0.75, 0.25, 1.5]),
        (lambda: X.heaviside(torch.ones(1)), [0, 0, 1, 1], [2.5, 0.75, 0.25, 1.5]),
        (lambda: X.clone().round_(), [-2, -1, 0, 2], [0.0, 0.25, 0.25, 0.0]),
        (lambda: X // 0.5, [-5, -2, 0, 3], [0.0, 0.5, 0.5, 0.0]),
        (lambda: X.div(0.5, rounding_mode="trunc"), [-5, -1, 0, 3], [0.0, 0.5, 0.5, 0.0]),
        (lambda: torch.bucketize(X, torch.tensor([-1.0, 1.0])), [0, 1, 1, 2], [1.5, 0.25, 0.75, 0.5]),
        (lambda: torch.searchsorted(torch.tensor([-1.0, 1.0]), X), [0, 1, 1, 2], [1.5, 0.25, 0.75, 0.5]),
        (lambda: torch.zeros(4, dtype=torch.int64).copy_(X), [-2, 0, 0, 1], [0.5, 0.25, 0.75, 0.5]),
    ],
)
def test_what_was_decided_and_its_margins(
    run: Callable[[], torch.Tensor], decided: list[float], margins: list[float]
) -> None:
    (one,) = seen(run)
    assert one.decided.tolist() == decided
    assert one.margins(one.operand.to(torch.float64)).tolist() == margins
    other = one.decided.roll(1)
    assert torch.equal(forced(run, other), other)


@pytest.mark.parametrize(
    ("run", "decided", "margins", "other", "result"),
    [
        (lambda: X.clone().gt_(0.5), [0, 0, 0, 1], [3.0, 1.25, 0.25, 1.0], [0, 0, 1, 1], [0, 0, 1, 1]),
        (lambda: F.threshold(X, 0.5, 7.0), [0, 0, 0, 1], [3.0, 1.25, 0.25, 1.0], [0, 0, 1, 1], [7, 7, 0.5, 1.5]),
        (lambda: F.hardshrink(X, 0.5), [0, 0, 1, 2], [2.0, 0.25, 0.25, 1.0], [0, 1, 1, 1], [-2.5, 0, 0, 0]),
        (lambda: X.round(decimals=1), [-25, -8, 2, 15], [0.5, 0, 0, 0.5], [-25, -7, 3, 15], [-2.5, -0.7, 0.3, 1.5]),
        (lambda: X.remainder(0.5), [-5, -2, 0, 3], [0, 0.5, 0.5, 0], [-5, -1, 0, 2], [0, -0.25, 0.25, 0.5]),
        (lambda: X.fmod(1), [-2, 0, 0, 1], [0.5, 0.25, 0.75, 0.5], [-2, 0, 0, 2], [-0.5, -0.75, 0.25, -0.5]),
    ],
)
def test_a_result_that_jumps_is_the_one_that_is_forced(
    run: Callable[[], torch.Tensor], decided: list[float], margins: list[float], other: list[float], result: list[float]
) -> None:
    (one,) = seen(run)
    assert one.decided.tolist() == decided
    assert one.margins(one.operand.to(torch.float64)).tolist() == pytest.approx(margins, abs=1e-5)
    assert torch.equal(forced(run, one.decided), run())
    assert forced(run, torch.tensor(other).to(one.decided.dtype)).tolist() == pytest.approx(result, abs=1e-5)


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.arange(3) > 1,
        lambda: torch.zeros(4).copy_(X),
        lambda: X / 2,
        lambda: F.max_pool1d(X.view(1, 4), 2),
        lambda: torch.isnan(X),
        lambda: X.to(torch.float64),
        lambda: X.to(torch.bool),
        lambda: F.relu(X),
        lambda: F.gelu(X),
        lambda: torch.softmax(X, 0),
    ],
)
def test_integers_and_what_is_smooth_decide_nothing(run: Callable[[], object]) -> None:
    assert seen(run) == []


SCORES = torch.tensor([[0.5, 0.25, 0.375], [1.0, 2.0, 4.0]])


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        (lambda: torch.topk(SCORES, 2), [[0, 2], [2, 1]]),
        (lambda: SCORES.sort(descending=True), [[0, 2, 1], [2, 1, 0]]),
        (lambda: SCORES.argmax(-1), [[0], [2]]),
        (lambda: SCORES.argmax(), [5]),
        (lambda: SCORES.argmin(-1, keepdim=True), [[1], [0]]),
        (lambda: SCORES.max(dim=1), [[0], [2]]),
        (lambda: SCORES.median(dim=1), [[2], [1]]),
        (lambda: SCORES.kthvalue(1), [[1], [0]]),
        (lambda: SCORES.cummax(1), [[0, 0, 0], [0, 1, 2]]),
    ],
)
def test_a_selection_can_be_another_one(run: Callable[[], torch.Tensor], kept: list[list[int]]) -> None:
    (one,) = seen(run)
    assert one.decided.tolist() == kept
    assert one.dim is not None
    wanted = (one.decided + 1) % one.operand.shape[one.dim]
    found: Any = forced(run, wanted)
    values, indices = found if isinstance(found, tuple) else (None, found)
    assert torch.equal(indices.reshape(wanted.shape), wanted)
    if values is not None:
        assert torch.equal(values.reshape(wanted.shape), SCORES.gather(one.dim, wanted))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("largest", [True, False])
def test_without_an_order_a_selection_is_a_set(dim: int, largest: bool) -> None:
    """The CPU returns such a set in an order of its own, CUDA by the places of its elements."""
    scores = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        return torch.topk(scores, 2, dim=dim, largest=largest, sorted=False).indices

    (decision,) = seen(run)
    chosen = torch.zeros(6, 6, dtype=torch.bool).scatter_(dim, run(), True)
    assert torch.equal(decision.decided, chosen)
    assert decision.dim is None
    assert decision.scores == 2
    margins = decision.margins(scores.double())
    bounds = scores.double().sort(dim=dim, descending=largest).values.movedim(dim, -1)
    last, first = bounds[..., 1:2].movedim(-1, dim), bounds[..., 2:3].movedim(-1, dim)
    assert torch.equal(margins, torch.where(chosen, (scores - first).abs(), (scores - last).abs()))
    other = chosen.roll(1, 1 if dim == 0 else 0)  # another set of as many in each line
    indices = forced(run, other)
    assert torch.equal(torch.zeros_like(other).scatter_(dim, indices, True), other)


def test_a_set_of_all_and_masked_scores_cannot_be_another_one() -> None:
    masked = torch.tensor([[0.5, -math.inf, -math.inf, 0.25]])
    (of_all,) = seen(lambda: torch.topk(masked, 4, sorted=False))
    assert torch.equal(of_all.margins(masked.double()), torch.full((1, 4), math.inf, dtype=torch.float64))
    (of_masked,) = seen(lambda: torch.topk(masked, 3, sorted=False))
    assert of_masked.margins(masked.double())[0, 1:3].tolist() == [0.0, 0.0], "of equal scores any may be chosen"


def test_the_margin_of_a_selection_is_the_gap_between_both_scores() -> None:
    here, there = torch.tensor([[0], [2]]), torch.tensor([[2], [2]])
    assert gaps(SCORES, 1, here, there).tolist() == [[0.125], [0.0]]


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        x = X.clone().requires_grad_()
        function(x * 1).sum().backward()
        assert x.grad is not None
        return x.grad

    return run


@pytest.mark.parametrize(
    ("function", "decided", "margins", "other", "gradient"),
    [
        (F.relu, [0, 0, 1, 1], [2.5, 0.75, 0.25, 1.5], [1, 0, 0, 1], [1, 0, 0, 1]),
        (lambda x: F.relu(x, inplace=True), [0, 0, 1, 1], [2.5, 0.75, 0.25, 1.5], [1, 0, 0, 1], [1, 0, 0, 1]),
        (lambda x: F.leaky_relu(x, 0.5), [0, 0, 1, 1], [2.5, 0.75, 0.25, 1.5], [1, 0, 0, 1], [1, 0.5, 0.5, 1]),
        (lambda x: F.hardtanh(x, -1, 1), [0, 1, 1, 2], [1.5, 0.25, 0.75, 0.5], [1, 0, 1, 1], [1, 0, 1, 1]),
        (lambda x: F.leaky_relu(x, 0.5, True), [0, 0, 1, 1], [1.25, 0.375, 0.25, 1.5], [1, 0, 0, 1], [1, 0.5, 0.5, 1]),
        (lambda x: F.prelu(x, HALF), [0, 0, 1, 1], [2.5, 0.75, 0.25, 1.5], [1, 0, 0, 1], [1, 0.5, 0.5, 1]),
        # just below 0 the slope is alpha, and not that of the point where the operand was
        (lambda x: F.elu(x, 2), [0, 0, 1, 1], [2.5, 0.75, 0.25, 1.5], [1, 0, 0, 1], [1, 2 * math.exp(-0.75), 2, 1]),
        (lambda x: F.threshold(x, 0.5, 0.5), [0, 0, 0, 1], [3, 1.25, 0.25, 1], [0, 0, 1, 1], [0, 0, 1, 1]),
        (F.relu6, [0, 0, 1, 1], [2.5, 0.75, 0.25, 1.5], [0, 1, 0, 1], [0, 1, 0, 1]),
        (lambda x: F.softshrink(x, 0.5), [0, 0, 1, 2], [2.0, 0.25, 0.25, 1.0], [0, 1, 2, 2], [1, 0, 1, 1]),
        (F.hardswish, [1, 1, 1, 1], [0.5, 2.25, 2.75, 1.5], [0, 1, 2, 1], [0, 0.25, 1, 1]),
    ],
)
def test_the_gradient_of_a_kink_goes_the_way_that_is_forced(
    function: Callable[[torch.Tensor], torch.Tensor],
    decided: list[int],
    margins: list[float],
    other: list[int],
    gradient: list[float],
) -> None:
    run = gradient_of(function)
    (one,) = seen(run, gradient=True)
    assert one.decided.tolist() == decided
    assert one.margins(one.operand.to(torch.float64)).tolist() == margins
    found = forced(run, torch.tensor(other, dtype=one.decided.dtype), gradient=True)
    assert found.tolist() == pytest.approx(gradient)
    assert torch.equal(forced(run, one.decided, gradient=True), run()), "and nothing changes where nothing is flipped"


@pytest.mark.parametrize("function", [F.elu, F.celu, lambda x: F.celu(x, 3.0)])
def test_a_kink_whose_sides_meet_is_none(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert seen(gradient_of(function), gradient=True) == []


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool1d(x.view(1, 1, 4), 2),
        lambda x: F.max_pool2d(x.view(1, 1, 1, 4), (1, 2)),
        lambda x: F.max_pool3d(x.view(1, 1, 1, 1, 4), (1, 1, 2)),
        lambda x: F.adaptive_max_pool1d(x.view(1, 1, 4), 2),
        lambda x: F.adaptive_max_pool2d(x.view(1, 1, 4), (1, 2)),  # without a batch
    ],
)
def test_the_gradient_of_a_maximum_goes_to_the_element_that_is_forced(
    pool: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    run = gradient_of(pool)
    (one,) = seen(run, gradient=True)
    assert one.dim is not None
    assert one.decided.flatten().tolist() == [1, 3]
    assert run().tolist() == [0, 1, 0, 1]
    wanted = torch.tensor([0, 3]).view(one.decided.shape)
    assert forced(run, wanted, gradient=True).tolist() == [1, 0, 0, 1]
    assert gaps(one.operand, one.dim, one.decided, wanted).flatten().tolist() == [1.75, 0.0]


@pytest.mark.parametrize("function", [lambda x: x.clamp(-1, 1), torch.abs, lambda x: torch.maximum(x, -x)])
def test_what_torch_composes_of_comparisons_and_signs_is_seen_backward(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert len(seen(gradient_of(function), gradient=True)) > 0


def test_in_float64_the_operand_is_exact_and_the_watcher_is_left_alone() -> None:
    dtypes = []

    def watch(decision: Decision) -> None:
        dtypes.extend([decision.operand.dtype, torch.ones(1).dtype])

    with Float64Mode(), DecisionMode(watch, gradient=False):
        (X * 0.1).round()
    assert dtypes == [torch.float64, torch.float32]
