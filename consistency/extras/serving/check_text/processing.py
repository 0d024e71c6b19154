"""How log probabilities were taken from logits, besides as the model's own: after a sampler's processing.

An engine's sampler divides logits by a temperature, masks the end of the text where it is told to go on, and leaves out
all but the most likely tokens (top-k, top-p, min-p). Some engines give the log probabilities of what is left, which a
trainer then takes for the model's. Each has a closed form in the exact logits. With z the logit of the token that was
chosen, T the temperature and K the tokens that are left, its log probability is

    z / T - log(sum over K of exp(z' / T)),

so the log probability that was given says, for each token by itself, how large that sum is, and with the logits sorted
how many of them are in it. All three ways to leave tokens out have one parameter, which this count bounds from both
sides at each token; the parameter is known where the bounds of all tokens have numbers in common. The bounds are as
wide as rounding makes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields

import msgspec
import torch
from msgspec.structs import replace

from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.transcription import Transcription

MASKED_END = "the end of the text masked"

_LEAST_TOKENS = 4
"""Parameters are fitted to the text: of fewer tokens nearly any log probabilities are those of some temperature."""

_MOST_FITTED = 16
"""Tokens that a temperature is fitted to; it is then held against all."""

_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.05, 10.0
_TEMPERATURE_STEP = 1.1
"""Factor between temperatures of the coarse search."""

_DIGITS = (1, 2, 3)
"""Decimals of a parameter that somebody sets: the fewest that fit name it."""

_USUAL_TOP_K = (1000, 500, 200, 100, 64, 50, 40, 30, 20, 10, 5)
_USUAL_TOP_P = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
USUAL_SAMPLERS = (
    *(Sampling(top_p=top_p) for top_p in _USUAL_TOP_P),
    *(Sampling(top_k=top_k) for top_k in _USUAL_TOP_K),
    *(Sampling(top_k=top_k, top_p=top_p) for top_k in (20, 40, 50, 64) for top_p in (0.95, 0.9, 0.8)),
    *(Sampling(min_p=min_p) for min_p in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)),
)
"""Samplers that are tried where rounding at each token is too large to tell the parameter."""

_LEADING = 512
"""Tokens that are sorted at first, the most likely ones: samplers seldom leave more, and to sort a whole vocabulary
takes longer than to compute the token."""

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

USUAL_TEMPERATURES = (1.0, 0.7, 0.6, 0.8, 0.9, 0.5, 1.2, 0.3, 0.2, 0.4, 0.1, 0.75, 0.95, 1.1, 1.5)
"""Temperatures that are tried together with tokens left out: there the temperature cannot be fitted by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """A way to take log probabilities from logits; the defaults are the model's own.

    Attributes
    ----------
    is_end_masked : bool
        The end of the text is ruled out wherever the text goes on.
    transcription : Transcription
        What became of them afterwards.
    """

    sampling: Sampling = Sampling()
    is_end_masked: bool = False
    transcription: Transcription = Transcription.AS_THEY_ARE

    @property
    def name(self) -> str:
        """What follows "with" in a report; empty for the model's own."""
        named = [str(self.sampling)] if str(self.sampling) else []
        if self.is_end_masked:
            named.append(MASKED_END)
        if self.transcription.value:
            named.append(self.transcription.value)
        return " and ".join(named)

    @property
    def is_own(self) -> bool:
        """Report whether these are the model's own log probabilities."""
        return self == MODEL

    def logprobs(self, logits: Logits, chosen: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Return the log probability of each token that was chosen, `(tokens, 1)`; NaN where it is not known.

        Parameters
        ----------
        chosen : torch.Tensor
            `(tokens,)`: the ids of the text.
        kept : torch.Tensor, optional
            `(tokens, vocabulary)`: the tokens that were left; those that these logits leave by default.
        """
        scaled = logits.of(is_end_masked=self.is_end_masked) / self.sampling.temperature
        if kept is None and self.sampling.leaves_out:
            kept = self.kept(logits, chosen)
        if kept is not None:
            scaled = scaled.masked_fill(~kept, -math.inf)
        return self.transcription.of(scaled.log_softmax(-1).gather(1, chosen[:, None]))

    def kept(
        self,
        logits: Logits,
        chosen: torch.Tensor,
        wanted: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return which tokens are left, `(tokens, vocabulary)`.

        Where a border lies within rounding, the number of tokens is taken that comes nearest to the log probabilities
        that are wanted. The token that was chosen is always among them, whose log probability would be infinite else.

        Parameters
        ----------
        wanted, allowed : torch.Tensor, optional
            `(tokens,)`: the log probabilities that came with the text, and what rounding may do to each.
        """
        of_logits = logits.of(is_end_masked=self.is_end_masked)
        slack = torch.zeros(len(chosen), dtype=torch.float64) if allowed is None else allowed
        kept = torch.zeros(of_logits.shape, dtype=torch.bool)
        for bounded in self._bounded(of_logits, chosen, slack):
            ranking, counts = bounded.ranking, bounded.fewest
            if wanted is not None:
                counts = ranking.nearest_counts(wanted[bounded.places], bounded.fewest, bounded.most)
            counts = counts.maximum(ranking.places + 1)
            is_left = torch.arange(ranking.scores.shape[1])[None] < counts[:, None]
            kept[bounded.places] = kept[bounded.places].scatter(1, ranking.order, is_left)
        return kept

    def places_outside(self, logits: Logits, chosen: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
        """Return the places of tokens that the sampler does not leave, whatever rounding does, in order.

        Parameters
        ----------
        slack : torch.Tensor
            `(tokens,)`: what rounding may do to the gap between a token and the largest.
        """
        slack = slack / self.sampling.temperature
        outside = list[torch.Tensor]()
        for bounded in self._bounded(logits.of(is_end_masked=self.is_end_masked), chosen, slack):
            last_left = bounded.ranking.scores.gather(1, bounded.most[:, None] - 1)[:, 0]
            is_outside = bounded.ranking.chosen_scores < last_left - slack[bounded.places]
            outside.append(bounded.places[is_outside])
        return torch.cat(outside).sort().values

    def _bounded(self, logits: torch.Tensor, chosen: torch.Tensor, slack: torch.Tensor) -> Iterator[BoundedRanking]:
        """Yield the ranking of all places, with the fewest and the most tokens that the sampler may leave there.

        The places where these lie among the leading tokens come first, and the others, whose vocabulary is sorted as a
        whole, after them.
        """
        temperature = self.sampling.temperature
        leading = Ranking.of(logits, chosen, temperature, leading=max(_LEADING, self.sampling.top_k + 1))
        fewest, most = leading.counts_left(self.sampling, slack)
        is_known = most.maximum(leading.places + 1) < leading.scores.shape[1]
        if leading.is_whole:
            is_known = torch.ones_like(is_known)
        known, others = is_known.nonzero()[:, 0], (~is_known).nonzero()[:, 0]
        yield BoundedRanking(places=known, ranking=leading.rows(known), fewest=fewest[known], most=most[known])
        if len(others) == 0:
            return
        whole = Ranking.of(logits[others], chosen[others], temperature)
        fewest, most = whole.counts_left(self.sampling, slack[others])
        yield BoundedRanking(places=others, ranking=whole, fewest=fewest, most=most)


MODEL = Processing()
"""The model's own log probabilities."""

TRANSCRIBED = tuple(Processing(transcription=each) for each in Transcription if each.value)
"""The model's own log probabilities, written down otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """The logits of the places in which tokens were chosen, `(tokens, vocabulary)` float64 each.

    Attributes
    ----------
    own : torch.Tensor
        The model's own.
    choosing : torch.Tensor
        Those that tokens are chosen by: after the sampler's penalties, where it has any.
    without_ends : torch.Tensor
        The same with the end of the text ruled out where the text goes on.
    """

    own: torch.Tensor
    choosing: torch.Tensor
    without_ends: torch.Tensor

    def of(self, *, is_end_masked: bool) -> torch.Tensor:
        """Return the logits that tokens are chosen by, or these with the end ruled out."""
        return self.without_ends if is_end_masked else self.choosing

    @property
    def masks_end(self) -> bool:
        """Report whether ruling out the end changes them."""
        return self.choosing is not self.without_ends and not torch.equal(self.choosing, self.without_ends)

    def at(self, places: torch.Tensor) -> Logits:
        """Return those of some tokens."""
        return Logits(own=self.own[places], choosing=self.choosing[places], without_ends=self.without_ends[places])

    @classmethod
    def joined(cls, of_texts: Sequence[Logits]) -> Logits:
        """Return the logits of several texts one after the other."""
        return cls(
            own=torch.cat([logits.own for logits in of_texts]),
            choosing=torch.cat([logits.choosing for logits in of_texts]),
            without_ends=torch.cat([logits.without_ends for logits in of_texts]),
        )


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The tokens of the vocabulary, most likely first, at each place of a text; all of them, or those that lead.

    Attributes
    ----------
    scores, order : torch.Tensor
        `(tokens, ranked)`: logits over temperature in descending order, and the ids that they are of.
    negated : torch.Tensor
        The scores with the other sign, in ascending order, in which a border is searched for.
    sums : torch.Tensor
        `(tokens, ranked)`: the logarithm of the sum of the exponentials of the first of them.
    sums_of_all : torch.Tensor
        `(tokens, 1)`: the same of the whole vocabulary.
    vocabulary : int
        Tokens of the vocabulary.
    chosen_scores, places : torch.Tensor
        `(tokens,)`: score of the token that was chosen, and its place in the order, from 0 on; the number of ranked
        tokens where it is none of them.
    """

    scores: torch.Tensor
    negated: torch.Tensor
    order: torch.Tensor
    sums: torch.Tensor
    sums_of_all: torch.Tensor
    vocabulary: int
    chosen_scores: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, chosen: torch.Tensor, temperature: float, leading: int | None = None) -> Ranking:
        """Sort the logits of each place.

        Parameters
        ----------
        leading : int, optional
            How many of the most likely tokens are ranked; all by default.
        """
        scaled = logits / temperature
        vocabulary = scaled.shape[1]
        if leading is None or leading >= vocabulary:
            scores, order = scaled.sort(stable=True, dim=-1, descending=True)
            sums = scores.logcumsumexp(-1)
            sums_of_all = sums[:, -1:]
        else:
            scores, order = scaled.topk(leading, dim=-1)
            sums = scores.logcumsumexp(-1)
            sums_of_all = scaled.logsumexp(-1, keepdim=True)
        is_chosen = order == chosen[:, None]
        places = is_chosen.to(torch.int8).argmax(-1)
        return cls(
            scores=scores,
            negated=-scores,
            order=order,
            sums=sums,
            sums_of_all=sums_of_all,
            vocabulary=vocabulary,
            chosen_scores=scaled.gather(1, chosen[:, None])[:, 0],
            places=torch.where(is_chosen.any(-1), places, order.shape[1]),
        )

    @property
    def is_whole(self) -> bool:
        """Report whether all tokens of the vocabulary are ranked."""
        return self.scores.shape[1] == self.vocabulary

    def at(self, temperature: float) -> Ranking:
        """Return the same tokens with scores that are divided by a temperature, which leaves their order.

        Raises
        ------
        ValueError
            If not all tokens are ranked: what the others add to the sums is then not known.
        """
        if temperature == 1:
            return self
        if not self.is_whole:
            message = "the sums of a ranking of leading tokens are known at its own temperature alone"
            raise ValueError(message)
        scores = self.scores / temperature
        sums = scores.logcumsumexp(-1)
        return replace_fields(
            self,
            scores=scores,
            negated=-scores,
            sums=sums,
            sums_of_all=sums[:, -1:],
            chosen_scores=self.chosen_scores / temperature,
        )

    def temperatures(self, wanted: torch.Tensor, allowed: torch.Tensor) -> Iterator[float]:
        """Yield the usual temperatures at which leaving tokens out may give log probabilities.

        That makes each token more likely, so none may be less likely than it is with all tokens, but for rounding.

        Parameters
        ----------
        wanted, allowed : torch.Tensor
            `(tokens,)`: the log probabilities that came with the text, and what rounding may do to each.
        """
        for temperature in USUAL_TEMPERATURES:
            with_all = self.chosen_scores / temperature - (self.scores / temperature).logsumexp(-1)
            if bool((wanted >= with_all - allowed / min(1.0, temperature)).all()):
                yield temperature

    def rows(self, places: torch.Tensor) -> Ranking:
        """Return the ranking of some places of the text."""
        return replace_fields(
            self,
            scores=self.scores[places],
            negated=self.negated[places],
            order=self.order[places],
            sums=self.sums[places],
            sums_of_all=self.sums_of_all[places],
            chosen_scores=self.chosen_scores[places],
            places=self.places[places],
        )

    def counts_left(self, sampling: Sampling, slack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fewest and the most tokens that a sampler may leave at each place, `(tokens,)` each.

        Of a ranking of leading tokens, a number that is smaller than theirs is right, and any other says "at least".

        Parameters
        ----------
        slack : torch.Tensor
            `(tokens,)`: what rounding may do to a log probability: borders this near may lie on either side.
        """
        size = self.vocabulary
        fewest = torch.full((len(self.scores),), size)
        most = fewest.clone()
        if sampling.top_k:
            fewest = fewest.clamp_max(sampling.top_k)
            most = most.clamp_max(sampling.top_k)
        if sampling.top_p < 1:
            # of the mass up to each token, a border may move by what rounding does to it
            masses = self.masses(sampling.top_k)
            moved = masses * (1 - masses).clamp_min(0) * 2 * slack[:, None]
            # a token is left where the mass before it is below top-p: so many as have not reached it, and one more
            fewest = fewest.minimum((masses + moved < sampling.top_p).sum(-1) + 1)
            most = most.minimum((masses - moved < sampling.top_p).sum(-1) + 1)
        if sampling.min_p > 0:
            distances = self.scores - self.scores[:, :1]
            least = math.log(sampling.min_p)
            fewest = fewest.minimum((distances - 2 * slack[:, None] >= least).sum(-1))
            most = most.minimum((distances + 2 * slack[:, None] >= least).sum(-1))
        return fewest.clamp(1, size), most.clamp(1, size)

    def _exact_counts_left(self, sampling: Sampling) -> torch.Tensor:
        """Return how many tokens a sampler leaves at each place, if nothing is rounded: `(tokens,)`.

        Sums and scores are sorted, so that borders are searched for: hundreds of samplers are tried on a text.
        """
        size = self.scores.shape[1]
        counts = torch.full((len(self.scores),), size)
        if sampling.top_k:
            counts = counts.clamp_max(sampling.top_k)
        if sampling.top_p < 1:
            whole = self._sums_left(sampling.top_k)
            # of the tokens whose mass is below top-p, and one more
            counts = counts.minimum(torch.searchsorted(self.sums, whole + _log(sampling.top_p))[:, 0] + 1)
        if sampling.min_p > 0:
            least = self.scores[:, :1] + math.log(sampling.min_p)
            counts = counts.minimum(torch.searchsorted(self.negated, -least, right=True)[:, 0])
        return counts.clamp(1, size)

    def masses(self, left: int = 0) -> torch.Tensor:
        """Return the probability of each token and all before it together, `(tokens, ranked)`.

        Parameters
        ----------
        left : int
            Tokens that a top-k has left before, as all engines take it first; 0 for all.
        """
        return (self.sums - self._sums_left(left)).exp()

    def _sums_left(self, left: int) -> torch.Tensor:
        """Return the logarithm of the sum of the exponentials of the first so many tokens, 0 for all: `(tokens, 1)`."""
        if left == 0:
            return self.sums_of_all
        last = min(left, self.vocabulary)
        return self.sums[:, last - 1 : last]

    def logprobs(self, sampling: Sampling) -> torch.Tensor:
        """Return the log probability of each token that was chosen, of what a sampler leaves, `(tokens,)`."""
        counts = self._exact_counts_left(sampling).maximum(self.places + 1)
        return self.chosen_scores - self.sums.gather(1, counts[:, None] - 1)[:, 0]

    def nearest_counts(self, wanted: torch.Tensor, fewest: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens, between two bounds, that comes nearest to log probabilities, `(tokens,)`."""
        # sums grow with the number of tokens, so the nearest is one of two neighbours
        targets = (self.chosen_scores - wanted)[:, None]
        above = torch.searchsorted(self.sums, targets)[:, 0] + 1
        nearest = fewest
        for counts in (above - 1, above, most):
            counts = counts.maximum(fewest).minimum(most)
            is_nearer = self._distances(counts, targets) < self._distances(nearest, targets)
            nearest = torch.where(is_nearer, counts, nearest)
        return nearest

    def _distances(self, counts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.sums.gather(1, counts[:, None] - 1) - targets).abs()[:, 0]

    def counts_that_fit(self, wanted: torch.Tensor, allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the fewest and the most tokens whose sum gives the log probabilities, `(tokens,)` each.

        None where no number of tokens does at some place, or only one that would leave out the token itself.
        """
        targets = self.chosen_scores - wanted
        fewest = torch.searchsorted(self.sums, (targets - allowed)[:, None])[:, 0] + 1
        most = torch.searchsorted(self.sums, (targets + allowed)[:, None], right=True)[:, 0]
        fewest = fewest.maximum(self.places + 1)
        if bool((fewest > most).any()):
            return None
        return fewest, most


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedRanking:
    """The ranking of some places of a text, and how many tokens a sampler may leave at each.

    Attributes
    ----------
    places : torch.Tensor
        `(places,)`: which tokens of the text these are.
    fewest, most : torch.Tensor
        `(places,)`: the fewest and the most tokens that may be left, at least 1.
    """

    places: torch.Tensor
    ranking: Ranking
    fewest: torch.Tensor
    most: torch.Tensor


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


def surprise_of(processing: Processing, logits: Logits, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much each token is less likely than a draw is on average, and the variance of that, `(tokens,)`.

    Of tokens that are drawn in this way the first has the mean zero: it is minus the log probability of the token,
    less the entropy of what it was drawn from.
    """
    scaled = logits.of(is_end_masked=processing.is_end_masked) / processing.sampling.temperature
    if processing.sampling.leaves_out:
        scaled = scaled.masked_fill(~processing.kept(logits, chosen), -math.inf)
    logprobs = scaled.log_softmax(-1)
    probabilities = logprobs.exp()
    surprises = torch.where(probabilities > 0, -logprobs, 0.0)
    entropy = (probabilities * surprises).sum(-1)
    variance = (probabilities * surprises.square()).sum(-1) - entropy.square()
    return -logprobs.gather(1, chosen[:, None])[:, 0] - entropy, variance.clamp_min(0)
