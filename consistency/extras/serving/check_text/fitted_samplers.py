"""Find the sampler whose processing gives the log probabilities that came with texts.

With z the logit of the token that was chosen, T the temperature and K the tokens that are left, its log probability is

    z / T - log(sum over K of exp(z' / T)),

so the log probability that was given says, for each token by itself, how large that sum is, and with the logits sorted
how many of them are in it. All three ways to leave tokens out have one parameter, which this count bounds from both
sides at each token; the parameter is known where the bounds of all tokens have numbers in common. The bounds are as
wide as rounding makes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch
from msgspec.structs import replace

from consistency.extras.serving.check_text.processing import Logits, Processing
from consistency.extras.serving.check_text.ranking import Ranking
from consistency.extras.serving.check_text.sampling import USUAL_SAMPLERS, Sampling

_LEAST_TOKENS = 4
"""Parameters are fitted to the text: of fewer tokens nearly any log probabilities are those of some temperature."""

_MOST_FITTED = 16
"""Tokens that a temperature is fitted to; it is then held against all."""

_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.05, 10.0
_TEMPERATURE_STEP = 1.1
"""Factor between temperatures of the coarse search."""

_DIGITS = (1, 2, 3)
"""Decimals of a parameter that somebody sets: the fewest that fit name it."""

_MOST_RANKED = 128
"""Tokens by which samplers are compared."""


def _spread_over(count: int) -> torch.Tensor:
    """Return the numbers of tokens by which samplers are compared, spread over all: certain ones tell of top-p."""
    return torch.arange(0, count, -(-count // _MOST_RANKED))


def _settings_of(sampling: Sampling) -> list[float]:
    """Return the settings that differ from the defaults."""
    default = Sampling()
    pairs = zip(msgspec.structs.astuple(sampling), msgspec.structs.astuple(default), strict=True)
    return [value for value, of_default in pairs if value != of_default]


def _digits(value: float) -> int:
    """Return how many digits a number has, without zeros at either end."""
    return len(f"{value:.4g}".replace(".", "").strip("0"))


_LEAST_SQUARE = 1e-14
"""Square of an error of float32: below it no way is nearer than another."""

_NEAREST = 3
"""Usual samplers that are tried, those with the smallest squares."""


def processings_of(
    wanted: torch.Tensor, logits: Logits, chosen: torch.Tensor, allowed: torch.Tensor
) -> list[Processing]:
    """Return ways in which the log probabilities of a text may have been taken, without the model's own.

    Parameters
    ----------
    wanted, allowed : torch.Tensor
        `(tokens,)`: the log probabilities that came with the text, and what rounding may do to each.
    chosen : torch.Tensor
        `(tokens,)`: the ids of the text.
    """
    masks = (False, True) if logits.masks_end else (False,)
    if len(wanted) < _LEAST_TOKENS:
        return [Processing(is_end_masked=True)] if logits.masks_end else []
    few = _spread_over(len(wanted))
    scores: dict[Processing, float] = {}
    for is_end_masked in masks:
        of_mask = logits.of(is_end_masked=is_end_masked)
        ranking = Ranking.of(of_mask, chosen, 1.0)  # sorted once: a temperature leaves the order
        of_few = ranking.rows(few)
        samplers = [Sampling()] if is_end_masked else []
        samplers += [Sampling(temperature=temperature) for temperature in _temperatures(wanted, of_mask, chosen)]
        fitted = next(_leaving_out(wanted, ranking, allowed), None)
        samplers += [] if fitted is None else [fitted]
        for sampling in [*samplers, *_nearest_usual(wanted[few], of_few, allowed[few])]:
            processing = Processing(sampling=sampling, is_end_masked=is_end_masked)
            errors = of_few.at(sampling.temperature).logprobs(sampling) - wanted[few]
            scores[processing] = score_of(processing, errors)
    return sorted(scores, key=lambda processing: scores[processing])


def score_of(processing: Processing, errors: torch.Tensor) -> float:
    """Return how badly a way explains log probabilities, of which it leaves these errors; lower is better.

    By its errors and the number of its parameters (Bayes's information criterion): a way of more parameters comes first
    only where it is so much nearer that chance is no reason.
    """
    # a number of more digits is as much more to choose
    parameters = processing.is_end_masked + sum(map(_digits, _settings_of(processing.sampling)))
    mean_square = float(errors.square().nanmean()) + _LEAST_SQUARE
    return len(errors) * math.log(mean_square) + 2 * parameters * math.log(max(2, len(errors)))


def _temperatures(wanted: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor) -> list[float]:
    """Return the temperature whose log probabilities are nearest to those wanted, to one, two and three decimals.

    0 and 1 are left out: the one is no temperature, and the other is the model's own way.
    """
    # the least likely tokens: where a token is certain at any temperature, nothing is learned of it
    fitted = wanted.argsort()[:_MOST_FITTED]
    wanted, logits, chosen = wanted[fitted], logits[fitted], chosen[fitted]

    def squared_error(temperature: float) -> float:
        logprobs = (logits / temperature).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        return float((logprobs - wanted).square().sum())

    count = math.ceil(math.log(_MOST_TEMPERATURE / _LEAST_TEMPERATURE, _TEMPERATURE_STEP))
    coarse = [_LEAST_TEMPERATURE * _TEMPERATURE_STEP**number for number in range(count)]
    nearest = min(coarse, key=squared_error)
    # then thirds: between two neighbours of the nearest one the error has one minimum
    low, high = nearest / _TEMPERATURE_STEP, nearest * _TEMPERATURE_STEP
    while high - low > 1e-5 * nearest:  # finer than the last decimal that is tried
        third = (high - low) / 3
        if squared_error(low + third) < squared_error(high - third):
            high -= third
        else:
            low += third
    rounded = dict.fromkeys(round((low + high) / 2, digits) for digits in _DIGITS)
    return [temperature for temperature in rounded if temperature not in (0.0, 1.0)]


def _leaving_out(wanted: torch.Tensor, ranking: Ranking, allowed: torch.Tensor) -> Iterator[Sampling]:
    """Yield samplers that leave tokens out and give these log probabilities, within what rounding allows.

    All tokens are tried at one temperature after another, a few of them first: most temperatures fit none.
    """
    few = wanted.argsort()[:_MOST_FITTED]
    ranking_of_few = ranking.rows(few)
    for temperature in ranking.temperatures(wanted, allowed):
        slack = allowed / min(1.0, temperature)
        if ranking_of_few.at(temperature).counts_that_fit(wanted[few], slack[few]) is None:
            continue
        at_temperature = ranking.at(temperature)
        counts = at_temperature.counts_that_fit(wanted, slack)
        if counts is None:
            continue
        yield from _parameters(at_temperature, *counts, slack, Sampling(temperature=temperature))


def _nearest_usual(wanted: torch.Tensor, ranking: Ranking, allowed: torch.Tensor) -> list[Sampling]:
    """Return the usual samplers whose log probabilities are nearest to those wanted, by their squares.

    Where rounding at each token is large, many numbers of tokens fit each, and all tokens together tell the parameter.
    """
    squares = {}
    for temperature in ranking.temperatures(wanted, allowed):
        at_temperature = ranking.at(temperature)
        for usual in USUAL_SAMPLERS:
            sampling = replace(usual, temperature=temperature)
            squares[sampling] = float((at_temperature.logprobs(sampling) - wanted).square().sum())
    return sorted(squares, key=lambda sampling: squares[sampling])[:_NEAREST]


def _parameters(
    ranking: Ranking, fewest: torch.Tensor, most: torch.Tensor, slack: torch.Tensor, base: Sampling
) -> Iterator[Sampling]:
    """Yield the parameters that leave between `fewest` and `most` tokens at every place, the simplest first."""
    size = ranking.scores.shape[1]
    if bool((most >= size).all()):
        return  # nothing is left out
    top_k = _whole_number_within(int(fewest.max()), int(most.min()))
    if top_k is not None:
        yield _leaving(base, top_k=top_k)
    for top_p in _top_p_within(ranking, fewest, most, slack):
        yield _leaving(base, top_p=top_p)
    for min_p in _min_p_within(ranking, fewest, most, slack):
        yield _leaving(base, min_p=min_p)
    # both: the places with most tokens are bounded by top-k, and the others by top-p
    largest = int(fewest.max())
    at_most = most[fewest == largest]
    top_k = _whole_number_within(largest, int(at_most.min()))
    if top_k is None:
        return
    by_p = most < top_k
    if not bool(by_p.any()) or bool(by_p.all()):
        return
    for top_p in _top_p_within(ranking.rows(by_p), fewest[by_p], most[by_p], slack[by_p], left=top_k):
        yield _leaving(base, top_k=top_k, top_p=top_p)


def _leaving(base: Sampling, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    """Return a sampler with the same temperature that leaves tokens out."""
    return Sampling(temperature=base.temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def _top_p_within(
    ranking: Ranking, fewest: torch.Tensor, most: torch.Tensor, slack: torch.Tensor, left: int = 0
) -> Iterator[float]:
    """Yield a top-p that leaves between `fewest` and `most` tokens at every place, if there is one.

    Parameters
    ----------
    left : int
        Tokens that a top-k before it has left; 0 for all.
    """
    masses = ranking.masses(left)
    moved = masses * (1 - masses).clamp_min(0) * 2 * slack[:, None]
    # so many tokens are left as first reach it: it is over the mass before the last one, and at most the mass with it
    before = (masses - moved).gather(1, (fewest - 2).clamp_min(0)[:, None])[:, 0]
    before = torch.where(fewest > 1, before, torch.zeros_like(before))
    reached = (masses + moved).gather(1, (most - 1)[:, None])[:, 0]
    value = _decimal_within(float(before.max()), float(reached.min()))
    if value is not None and 0 < value < 1:
        yield value


def _min_p_within(ranking: Ranking, fewest: torch.Tensor, most: torch.Tensor, slack: torch.Tensor) -> Iterator[float]:
    """Yield a min-p that leaves between `fewest` and `most` tokens at every place, if there is one."""
    distances = ranking.scores - ranking.scores[:, :1]
    last = distances.gather(1, (fewest - 1)[:, None])[:, 0] + 2 * slack
    size = distances.shape[1]
    after = distances.gather(1, most.clamp_max(size - 1)[:, None])[:, 0] - 2 * slack
    after = torch.where(most < size, after, torch.full_like(after, -math.inf))
    value = _decimal_within(float(after.max().exp()), float(last.min().exp()))
    if value is not None and 0 < value < 1:
        yield value


def _decimal_within(low: float, high: float) -> float | None:
    """Return the number over `low` and up to `high` that has the fewest decimals; None where there is none."""
    if not low < high:
        return None
    for digits in (1, 2, 3, 4):
        value = math.ceil(low * 10**digits) / 10**digits
        candidates = [round(value + step / 10**digits, digits) for step in (0, 1)]
        for candidate in candidates:
            if low < candidate <= high and candidate > 0:
                return candidate
    return (low + high) / 2


def _whole_number_within(low: int, high: int) -> int | None:
    """Return the whole number between two bounds that has the fewest digits other than zero; None where none is."""
    if low > high:
        return None
    step = int(10 ** len(str(high)))
    while step >= 1:
        candidate = -(-low // step) * step
        if low <= candidate <= high and candidate > 0:
            return candidate
        step //= 10
    return low
