"""What log probabilities lean to as a whole, where no token shows it by itself."""

from __future__ import annotations

import pytest
import torch

from consistency.extras.serving.check_text.arithmetic import log_softmax_error
from consistency.extras.serving.check_text.judged_text import TokenFigures
from consistency.extras.serving.check_text.power import can_lean, leaning_to, written_by
from consistency.extras.serving.check_text.screening import PlainText, Screen
from consistency.extras.serving.check_text.texts import Tokens


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


VOCABULARY = 49_152
SCREEN = Screen(logprob=1e-5, gap=1e-5, deviation=1e-6)
"""Of a float32 model, whose rounding is far below what two adapters differ by."""


def _plain(given: torch.Tensor, logprobs: torch.Tensor) -> PlainText:
    """Return a text in one pass with an adapter, which gives it these log probabilities."""
    count = len(given)
    tokens = Tokens(prompt=[1], ids=[0] * count, is_exact=True, logprobs=given.tolist())
    zeros, ones = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    figures = TokenFigures(
        gaps=zeros,
        logprobs=logprobs,
        margins=ones,
        largest=torch.zeros(count, dtype=torch.long),
        weights=ones,
        past_end=0,
        vocabulary=VOCABULARY,
    )
    return PlainText(tokens=tokens, figures=figures)


@pytest.mark.parametrize("error", ["of all alike", "of single tokens"])
def test_the_adapter_that_wrote_a_text_is_told_for_all_that_rounding_does(error: str) -> None:
    generator = torch.Generator().manual_seed(0)
    count = 2000
    of_writer = -torch.rand(count, generator=generator, dtype=torch.float64)
    # adapters differ by far more than rounding, and to one side
    of_other = of_writer - torch.rand(count, generator=generator, dtype=torch.float64)
    errors = 1e-6 * torch.randn(count, generator=generator, dtype=torch.float64)
    if error == "of all alike":
        errors -= 0.9 * log_softmax_error(VOCABULARY)
    else:
        errors[::10] = -3e-5
    given = of_writer + errors
    passes = {"writer": _plain(given, of_writer), "other": _plain(given, of_other)}
    assert written_by(passes, SCREEN, is_sampled=True, far=4.0) == "writer"
    # one that is between two adapters was written by none of them
    between = (of_writer + of_other) / 2
    passes = {"writer": _plain(between, of_writer), "other": _plain(between, of_other)}
    assert written_by(passes, SCREEN, is_sampled=True, far=4.0) == ""
