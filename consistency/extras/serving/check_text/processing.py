"""How log probabilities were taken from logits, besides as the model's own: after a sampler's processing.

An engine's sampler divides logits by a temperature, masks the end of the text where it is told to go on, and leaves out
all but the most likely tokens (top-k, top-p, min-p). Some engines give the log probabilities of what is left, which a
trainer then takes for the model's. Each has a closed form in the exact logits; `fitted_samplers.py` finds which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from consistency.extras.serving.check_text.ranking import BoundedRanking, Ranking
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.transcription import Transcription

MASKED_END = "the end of the text masked"

_LEADING = 512
"""Tokens that are sorted at first, the most likely ones: samplers seldom leave more, and to sort a whole vocabulary
takes longer than to compute the token."""


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
