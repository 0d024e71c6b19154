"""A sampler as it is stated on a command line, and as it is found from log probabilities."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from consistency.errors import UsageError
from consistency.extras.serving.check_text.command import sampling_of
from consistency.extras.serving.check_text.fitted_samplers import processings_of
from consistency.extras.serving.check_text.processing import Logits, Processing
from consistency.extras.serving.check_text.ranking import Ranking
from consistency.extras.serving.check_text.sampling import USUAL_SAMPLERS, Sampling


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ("1", Sampling()),
        ("temperature=0.7", Sampling(temperature=0.7)),
        ("temperature=0.7, top_k=20,top_p=0.9", Sampling(temperature=0.7, top_k=20, top_p=0.9)),
        ("min_p=0.05", Sampling(min_p=0.05)),
    ],
)
def test_a_sampler_is_read(settings: str, wanted: Sampling) -> None:
    assert sampling_of(settings) == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("temprature=0.7", "not a setting of a sampler"),
        ("top_p=1.5", "top_p has no such value"),
        ("top_k=many", "top_k has no such value"),
        ("", "not a setting of a sampler"),
    ],
)
def test_what_is_no_sampler_is_refused(settings: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sampling_of(settings)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=20),
        Sampling(top_p=0.9),
        Sampling(min_p=0.05),
        Sampling(temperature=0.7),
        Sampling(temperature=0.6, top_k=20, top_p=0.95),
        Sampling(temperature=0.8, top_p=0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("noise", [1e-6, 0.02])
def test_a_sampler_is_found_from_the_log_probabilities(sampling: Sampling, noise: float) -> None:
    """With the noise of float32 at each token, and with that of a half type by all tokens together."""
    generator = torch.Generator().manual_seed(0)
    # some tokens are certain and others are not: top-k tells of these, and top-p of those
    sharpness = torch.linspace(0.5, 5.0, 200, dtype=torch.float64)[:, None]
    own = torch.randn(200, 500, generator=generator, dtype=torch.float64) * sharpness
    logits = Logits(own=own, choosing=own, without_ends=own)
    processing = Processing(sampling=sampling)
    drawn_from = (own / sampling.temperature).masked_fill(
        ~processing.kept(logits, own.argmax(-1)) if sampling.leaves_out else torch.zeros_like(own, dtype=torch.bool),
        -torch.inf,
    )
    chosen = torch.multinomial(drawn_from.softmax(-1), 1, generator=generator)[:, 0]
    exact = processing.logprobs(logits, chosen)[:, 0]
    given = exact + noise * torch.randn(200, generator=generator, dtype=torch.float64)
    found = processings_of(given, logits, chosen, torch.full((200,), 8 * noise, dtype=torch.float64))
    assert found[0] == processing


def test_no_sampler_is_found_where_none_was() -> None:
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(200, 500, generator=generator, dtype=torch.float64) * 4
    chosen = torch.multinomial(own.softmax(-1), 1, generator=generator)[:, 0]
    other = torch.randn(200, generator=generator, dtype=torch.float64) - 3
    logits = Logits(own=own, choosing=own, without_ends=own)
    found = processings_of(other, logits, chosen, torch.full((200,), 1e-5, dtype=torch.float64))
    for processing in found:  # the nearest are given, and each is far off
        errors = processing.logprobs(logits, chosen)[:, 0] - other
        assert float(errors.abs().max()) > 1e-2


def test_tokens_that_a_sampler_does_not_leave() -> None:
    own = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]], dtype=torch.float64).expand(3, 5)
    logits = Logits(own=own, choosing=own, without_ends=own)
    chosen = torch.tensor([0, 2, 4])
    slack = torch.zeros(3, dtype=torch.float64)
    assert Processing(sampling=Sampling(top_k=3)).places_outside(logits, chosen, slack).tolist() == [2]
    assert Processing(sampling=Sampling(top_p=0.5)).places_outside(logits, chosen, slack).tolist() == [1, 2]
    wide = torch.full((3,), 5.0, dtype=torch.float64)
    assert Processing(sampling=Sampling(top_p=0.5)).places_outside(logits, chosen, wide).tolist() == []


def test_the_mass_that_is_left_by_top_p() -> None:
    own = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64))
    ranking = Ranking.of(own, torch.tensor([1]), 1.0)
    for top_p, count in ((0.4, 1), (0.5, 1), (0.6, 2), (0.8, 2), (0.81, 3), (0.99, 4)):
        fewest, most = ranking.counts_left(Sampling(top_p=top_p), torch.zeros(1, dtype=torch.float64))
        assert fewest.tolist() == most.tolist() == [count], top_p


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_borders_are_found_by_search_as_by_counting(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 500, dtype=torch.float64, generator=generator) * 3
    chosen = torch.randint(0, 500, (40,), generator=generator)
    ranking = Ranking.of(logits, chosen, temperature)
    extremes = (Sampling(top_k=7, top_p=0.6), Sampling(top_p=0.0), Sampling(min_p=1.0), Sampling(top_k=10**6))
    for sampling in (*USUAL_SAMPLERS, *extremes):
        counted = ranking.counts_left(sampling, torch.zeros(40, dtype=torch.float64))[0].maximum(ranking.places + 1)
        expected = ranking.chosen_scores - ranking.sums.gather(1, counted[:, None] - 1)[:, 0]
        assert torch.equal(ranking.logprobs(sampling), expected), sampling


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Sampling(top_k=20), [TopKLogitsWarper(20)]),
        (Sampling(top_k=900), [TopKLogitsWarper(900)]),
        (Sampling(top_p=0.9), [TopPLogitsWarper(0.9)]),
        (Sampling(min_p=0.05), [MinPLogitsWarper(0.05)]),
        (
            Sampling(temperature=0.7, top_k=700, top_p=0.95),
            [TemperatureLogitsWarper(0.7), TopKLogitsWarper(700), TopPLogitsWarper(0.95)],
        ),
        # more tokens than there are: all are left
        (Sampling(top_k=5000, top_p=0.9), [TopPLogitsWarper(0.9)]),
    ],
    # a processor has the address of its object in its words, which differs between processes
    ids=lambda value: str(value) if isinstance(value, Sampling) else "",
)
def test_tokens_that_are_left_are_those_of_transformers(sampling: Sampling, warpers: list[LogitsProcessor]) -> None:
    """Of a vocabulary that is larger than what is sorted at first: some places leave few tokens, others most."""
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.linspace(0.1, 6.0, 60, dtype=torch.float64)[:, None]
    own = torch.randn(60, 3000, generator=generator, dtype=torch.float64) * sharpness
    warped = LogitsProcessorList(warpers)(torch.empty(60, 0), own.clone())
    chosen = torch.multinomial(warped.softmax(-1), 1, generator=generator)[:, 0]
    logits, processing = Logits(own=own, choosing=own, without_ends=own), Processing(sampling=sampling)
    assert torch.equal(processing.kept(logits, chosen), warped.isfinite())
    logprobs = warped.log_softmax(-1).gather(1, chosen[:, None])
    torch.testing.assert_close(processing.logprobs(logits, chosen), logprobs)
    least_likely = own.argmin(-1, keepdim=True)
    is_left_out = warped.gather(1, least_likely)[:, 0].isinf()
    outside = processing.places_outside(logits, least_likely[:, 0], torch.zeros(60))
    assert torch.equal(outside, is_left_out.nonzero()[:, 0])
    assert processing.places_outside(logits, chosen, torch.zeros(60)).tolist() == []
