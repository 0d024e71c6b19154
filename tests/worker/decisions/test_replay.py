"""Two workers that decide otherwise: what is undecided, what is a fault, and what both compute on one track."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from consistency.numerics.decisions import Watch
from consistency.numerics.exact import in_float64
from consistency.worker.decisions.replay import Replay, deciding
from consistency.worker.decisions.track import Track

PRODUCTS = "float32"
FIRST = torch.linspace(-1, 1, 64 * 16).reshape(64, 16).sin()
SECOND = torch.linspace(-2, 1, 16 * 8).reshape(16, 8).cos()


class Model(torch.nn.Module):
    """A layer that makes rounding errors, and then decides by its result; `off` is a device's own error."""

    def __init__(self, decide: Callable[[torch.Tensor], torch.Tensor], tie: float) -> None:
        super().__init__()
        self.act = Act(decide)
        x = FIRST @ SECOND
        self.shift = tie - float(x[5, 3])  # brings one value close to where the decision changes

    def forward(self, off: float = 0.0) -> torch.Tensor:
        x = (FIRST @ SECOND) + self.shift
        x[5, 3] += off
        found: torch.Tensor = self.act(x)
        return found


class Act(torch.nn.Module):
    def __init__(self, decide: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.decide = decide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decide(x)


def routed(x: torch.Tensor) -> torch.Tensor:
    """Send each row to the two experts with the largest scores of three, two of which are nearly equal."""
    scores = torch.stack([x[:, 3] * 0, x[:, 3], x[:, 3] * 0 - 9], 1)
    weights, experts = scores.topk(1, dim=1)
    return (weights + 1) * torch.tensor([1.0, 10.0, 100.0])[experts]


def pooled(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the larger of two scores in each row, which are nearly equal in one."""
    scores = torch.stack([x[:, 3] * 0, x[:, 3]], 1).unsqueeze(1)
    return gradient_of(lambda scores: torch.nn.functional.max_pool1d(scores, 2), scores)


def leaking(x: torch.Tensor) -> torch.Tensor:
    return gradient_of(lambda x: torch.nn.functional.prelu(x, torch.full((1,), 0.25)), x)


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(x).sum(), x)
    return found


DECIDE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "hard mask": (lambda x: torch.where(x > 0, x + 7, 0), 0.0),
    "quantized": (lambda x: (x * 4).round() / 4, 0.125),
    "router": (routed, 0.0),
    "mask in place": (lambda x: x + 7 * x.clone().gt_(0), 0.0),
    "bucket": (lambda x: torch.bucketize(x, torch.tensor([-0.5, 0.0, 9.0])).to(x.dtype), 0.0),
    "maximum of a window, backward": (pooled, 0.0),
    "PReLU, backward": (leaking, 0.0),
}


def judged(model: Model, tmp_path: Path, off: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Replay]:
    """Return the exact result, that of the CPU on its track, that of a device that is off on it, and the replay."""
    path = tmp_path / "decisions.bin"
    track = Track(path)

    def run(watch: Watch | None, off: float = 0.0) -> torch.Tensor:
        with torch.no_grad(), deciding(watch, gradient=True):
            found: torch.Tensor = model(off)
            return found

    exact = in_float64(run, track.exact("0"))
    own = run(track.other("0", PRODUCTS))
    track.publish()
    replay = Replay(path, model, PRODUCTS)
    with replay.places:
        found = run(replay.watch("0"), off)
    assert replay.was_complete("0")
    return exact, own, found, replay


@pytest.mark.parametrize("kind", DECIDE)
def test_a_flip_that_rounding_explains_is_undecided_and_is_compared_on_the_track(kind: str, tmp_path: Path) -> None:
    model = Model(*DECIDE[kind])
    for off in (-3e-7, 3e-7):  # the one or the other is on the other side
        exact, own, found, replay = judged(model, tmp_path, off)
        if replay.flips:
            break
    (flip,) = replay.flips
    assert flip.is_undecided
    assert (flip.place, flip.elements) == ("act", 1)
    assert flip.margin <= 1e-5
    assert float((own - exact).abs().max()) < 1e-4
    assert float((found - exact).abs().max()) < 1e-4
    assert float((model(off) - exact).abs().max()) > 0.1, "which is a jump without the track"


@pytest.mark.parametrize("kind", DECIDE)
def test_a_flip_that_rounding_does_not_explain_is_none(kind: str, tmp_path: Path) -> None:
    """A tenth away, ten thousand times what rounding explains."""
    decide, tie = DECIDE[kind]
    *_, replay = judged(Model(decide, tie + 0.02), tmp_path, -0.04)
    (flip,) = replay.flips
    assert not flip.is_undecided
    assert flip.margin == pytest.approx(0.08 if kind == "quantized" else 0.02, abs=1e-4)
    assert flip.allowed < 1e-4


def test_a_worker_that_decides_alike_has_no_flip(tmp_path: Path) -> None:
    decide, tie = DECIDE["hard mask"]
    *_, replay = judged(Model(decide, tie + 0.02), tmp_path, 0.0)  # nearer, rounding decides, which kernels differ in
    assert replay.flips == []


def test_a_pass_with_noise_follows_the_track(tmp_path: Path) -> None:
    model = Model(lambda x: torch.where(x > 0, x + 7, 0), 0.0)
    track = Track(tmp_path / "d.bin")
    in_float64(lambda: deciding_once(model, track.exact("0")))
    answers = []
    for off in (-1e-3, 1e-3):  # the one or the other is on the other side
        with torch.no_grad(), deciding(track.other("0", PRODUCTS), gradient=False):
            answers.append(model(off))
    assert float((answers[0] - answers[1]).abs().max()) < 0.1, "else it jumps by 7"


def deciding_once(model: torch.nn.Module, watch: Watch | None) -> None:
    with deciding(watch, gradient=False):
        model()


def test_other_operations_than_those_of_the_track_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "d.bin"
    model = Model(*DECIDE["hard mask"])
    track = Track(path)
    in_float64(lambda: deciding_once(model, track.exact("0")))
    track.publish()
    for decide in (lambda x: x.round(), lambda x: torch.where(x > 0, x, 0) + (x > 1), lambda x: x):
        other = Model(decide, 0.0)
        replay = Replay(path, other, PRODUCTS)
        with deciding(replay.watch("0"), gradient=False):
            other()
        assert not replay.was_complete("0")
        assert not replay.is_complete()


def test_a_model_that_decides_nothing_is_not_watched_again(tmp_path: Path) -> None:
    path = tmp_path / "d.bin"
    track = Track(path)
    with deciding(track.exact("0"), gradient=False):
        torch.ones(2).sum()
    assert not track.decides
    assert track.other("0") is None
    track.publish()
    replay = Replay(path, torch.nn.Identity(), PRODUCTS)
    assert not replay.decides
    assert replay.watch_if_any("0") is None
    assert replay.is_complete()
