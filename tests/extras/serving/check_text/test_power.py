"""What log probabilities lean to as a whole, where no token shows it by itself."""

from __future__ import annotations

import torch

from consistency.extras.serving.check_text.power import can_lean, leaning_to


def _pairs(leaning: float, texts: int = 40) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return differences with noise of a tenth of what the adapter does, and what leaving the adapter out changes."""
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(texts)]
    noise = [0.1 * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(texts)]
    return [leaning * each + error for each, error in zip(directions, noise, strict=True)], directions


def test_another_scaling_is_said_with_its_error() -> None:
    assert "as if it were 1.10 of what it is" in leaning_to(*_pairs(-0.1))
    assert "as if it were 0.80 of what it is" in leaning_to(*_pairs(0.2))


def test_noise_leans_to_nothing() -> None:
    assert leaning_to(*_pairs(0.0)) == ""
    assert leaning_to(*_pairs(-0.01)) == "", "a rounded merge moves it by as much"
    assert leaning_to(*_pairs(-0.1, texts=3)) == "", "of three texts the error is not known"


def test_differences_that_cannot_lean_are_known_by_some_directions() -> None:
    differences, directions = _pairs(-0.1)
    assert can_lean(differences, directions[:1])
    assert can_lean(differences, directions), "they do lean"
    small = [each / 1000 for each in differences]
    assert not can_lean(small, directions[:1])
    assert leaning_to(small, directions) == ""
    assert can_lean([torch.full_like(each, torch.nan) for each in differences], directions), "NaN is bounded by nothing"
