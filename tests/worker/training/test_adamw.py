"""The optimizer's step: as torch takes it, and its exact value with what it may be off."""

from __future__ import annotations

import pytest
import torch

from consistency.numerics.running_error import Arithmetic, measure_tracked
from consistency.worker.training import adamw


def of_step(dtype: torch.dtype, g: torch.Tensor, *, steps: int = 0, off: float = 1.0) -> float:
    """Return which share of its bound a step of AdamW uses up."""
    generator = torch.Generator().manual_seed(5)
    p = (torch.randn(g.shape, generator=generator) * 0.1).to(dtype)
    g = g.to(dtype)
    moments = None
    if steps:
        first, second = (torch.randn(g.shape, generator=generator) * g.float().abs() for _ in range(2))
        moments = adamw.Moments(first=first.to(dtype), second=second.square().to(dtype), steps=steps)
    found = adamw.step(p, g, moments)
    found = torch.lerp(p, found, off) if off != 1 else found
    by = Arithmetic.of(dtype)
    given = (p, g) if moments is None else (p, g, moments.first, moments.second)
    exact = adamw.exact_step(*(by.known(t.to(torch.float64).numpy()) for t in given), steps=steps)
    measured = measure_tracked(found, exact)
    assert measured.ratio is not None
    return float(measured.ratio)


GRADIENTS = {
    "usual": torch.linspace(-1, 1, 999),
    "zero": torch.zeros(9),
    "of the size of epsilon": torch.linspace(-1e-7, 1e-7, 999),
    "whose square underflows": torch.linspace(-1e-21, 1e-21, 999),
    "large": torch.linspace(-1e12, 1e12, 999),
    "of every size": torch.logspace(-30, 10, 999) * torch.tensor([1.0, -1.0]).repeat(500)[:999],
}


@pytest.mark.parametrize("steps", [0, 1, 50])
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_inside_its_bound(dtype: torch.dtype, kind: str, steps: int) -> None:
    assert of_step(dtype, GRADIENTS[kind], steps=steps) <= 1


def test_a_step_that_goes_a_thousandth_too_far_is_outside() -> None:
    assert of_step(torch.float32, GRADIENTS["usual"], off=1.001) > 5
    assert of_step(torch.float32, GRADIENTS["usual"], off=-1) > 100
    assert of_step(torch.float32, GRADIENTS["usual"], off=0) > 100


def test_the_exact_step_is_that_of_float64() -> None:
    g = GRADIENTS["usual"].double()
    p = torch.linspace(-0.1, 0.1, 999, dtype=torch.float64)
    by = Arithmetic.of(torch.float64)
    exact = adamw.exact_step(by.known(p.numpy()), by.known(g.numpy()))
    assert torch.allclose(torch.from_numpy(exact.value), adamw.step(p, g), rtol=1e-14, atol=1e-17)
