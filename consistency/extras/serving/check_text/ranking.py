"""The tokens of a vocabulary in the order of their logits, and how many of them a sampler leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from consistency.extras.serving.check_text.sampling import USUAL_TEMPERATURES, Sampling


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
        return replace(
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
        return replace(
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
