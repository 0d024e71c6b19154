r"""How far the log probabilities of texts are from a model's as a whole, in the figures that trainers log.

With :math:`d` the log probability that came with a token minus the one of a pass here, for tokens that were drawn by
what gave the first: the mean of d is an estimate of the divergence KL(writer | model), and
:math:`e^{-d} - 1 + d` another one, never negative, of smaller variance (Schulman, *Approximating KL divergence*, 2020);
:math:`e^{-d}` is the ratio that a trainer clips.

**The threshold.** The same figures of two healthy passes of this model in this dtype are taken from passes with
random rounding errors over a sample of the texts. The mean of :math:`|d|` may be twice theirs at least (as
`numerics.rules.error_factor`: two devices round in different ways), and more where texts are few: with n texts and m
passes over texts of the sample, whose means have the standard deviation s, Student's limit times
:math:`s \sqrt{1/n + 1/m}` above their mean.

The mean of d is small where d is noise, so it shows what adds something to every token, as a sampler does that leaves
tokens out. It is not zero: tokens are drawn by what gave the log probabilities, so its mean is the divergence, and a
logarithm of noisy probabilities is lower on average by as much again. Four times the divergence of the healthy passes
is allowed, and Student's limit times the standard error of the mean between texts, which has to be distinct ones: of
equal texts it would be zero. It is at least that of as many independent tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from consistency.extras.serving.check_text.judged_text import JudgedText
from consistency.extras.serving.check_text.summary import Differences, LogprobSummary
from consistency.numerics.error_spread import student
from consistency.numerics.rules import LEAST_FACTOR

CLIPPED = 0.2
"""Distance of a ratio from 1 beyond which trainers clip by default."""


def differences_of(differences: torch.Tensor) -> Differences:
    """Return the figures of differences, `(tokens,)` float64; those that are NaN are left out."""
    d = differences[~differences.isnan()]
    if not len(d):
        return Differences(tokens=0, mean=0.0, mean_abs=0.0, deviation=0.0, kl=0.0, largest_ratio=1.0, clipped=0.0)
    ratios = (-d).exp()
    return Differences(
        tokens=len(d),
        mean=float(d.mean()),
        mean_abs=float(d.abs().mean()),
        deviation=float(d.std(correction=0)),
        kl=float((ratios - 1 + d).mean()),
        largest_ratio=float(d.abs().max().exp()),
        clipped=float(((ratios - 1).abs() > CLIPPED).to(torch.float64).mean()),
    )


_DEVIATIONS = 6.0
"""Standard deviations that chance does not reach: a normal deviate exceeds them once in 10⁹."""

_BARS = 12
"""Edges of the histogram: they go down from the larger of both largest differences by halves."""


def summarize(
    differences: Sequence[torch.Tensor], sample: Sequence[JudgedText], rounding: float = 0.0
) -> LogprobSummary | None:
    """Hold differences against those of healthy passes over a sample of the texts.

    None where no log probability came with any text.

    Parameters
    ----------
    differences : sequence of torch.Tensor
        `(tokens,)` for each text that has log probabilities.
    rounding : float
        Largest error of every log probability alike, such as that of how many digits the file has.
    """
    if not differences:
        return None
    found = torch.cat(list(differences))
    found = found[~found.isnan()]
    pairs = [pair for judged in sample for pair in _healthy_pairs(judged)]
    healthy = torch.cat(pairs)
    edges = _edges(found, healthy)
    return LogprobSummary(
        found=differences_of(found),
        healthy=differences_of(healthy),
        threshold=_threshold(pairs, len(differences), len(sample)) + rounding,
        mean_threshold=_mean_threshold(differences, differences_of(healthy)) + rounding,
        histogram=_counts(found, edges),
        healthy_histogram=_counts(healthy, edges),
        edges=tuple(edges.tolist()),
    )


def _healthy_pairs(judged: JudgedText) -> list[torch.Tensor]:
    """Return differences of each two passes with noise that follow each other, `(tokens,)` each."""
    noisy = judged.noisy_logprobs
    given = judged.tokens.judged_logprobs
    is_given = torch.ones(noisy.shape[1], dtype=torch.bool) if given is None else ~given.isnan()
    return list((noisy - noisy.roll(1, 0))[:, is_given])


def _threshold(pairs: Sequence[torch.Tensor], texts: int, sampled: int) -> float:
    means = torch.stack([pair.abs().mean() for pair in pairs if len(pair)])
    mean = float(means.mean())
    # of K passes over a text K - 1 differences are independent
    independent = max(2, len(means) - sampled)
    deviation = float(means.std(correction=0)) * math.sqrt(independent / (independent - 1))
    by_chance = student(independent - 1) * deviation * math.sqrt(1 / texts + 1 / independent)
    return max(LEAST_FACTOR * mean, mean + by_chance)


def _mean_threshold(differences: Sequence[torch.Tensor], healthy: Differences) -> float:
    """Return the largest magnitude of the mean difference that rounding explains.

    Parameters
    ----------
    differences : sequence of torch.Tensor
        `(tokens,)` for each text.
    healthy : Differences
        Of two healthy passes.
    """
    sums = torch.stack([of_text.nansum() for of_text in differences])
    counts = torch.stack([(~of_text.isnan()).sum() for of_text in differences]).to(torch.float64)
    if len(sums) < 2:
        return math.inf
    # the error of a mean whose texts have unlike lengths: each text's sum less its tokens' share of the whole
    residuals = sums - counts * (sums.sum() / counts.sum())
    error = float(residuals.square().sum().sqrt() / counts.sum()) * math.sqrt(len(sums) / (len(sums) - 1))
    of_tokens = _DEVIATIONS * healthy.deviation / math.sqrt(float(counts.sum()))
    return 4 * healthy.kl + max(student(len(sums) - 1) * error, of_tokens)


def _edges(found: torch.Tensor, healthy: torch.Tensor) -> torch.Tensor:
    finite = torch.cat([found.abs(), healthy.abs()])
    finite = finite[finite.isfinite()]
    largest = float(finite.max()) if len(finite) else 1.0
    top = 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 1.0
    return torch.tensor([top / 2**step for step in reversed(range(_BARS))], dtype=torch.float64)


def _counts(differences: torch.Tensor, edges: torch.Tensor) -> tuple[int, ...]:
    bars = torch.bucketize(differences.abs(), edges, right=True)
    return tuple(torch.bincount(bars, minlength=len(edges) + 1).tolist())
