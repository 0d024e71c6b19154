r"""Name the format that an engine rounded weights to, by the log probabilities of several texts together.

Rounding weights moves each log probability by an amount that a pass with these weights shows, f. What the writer's log
probabilities are off by, d, is regressed on it: the coefficient is 1 where the writer's weights are these, less where
they are nearly these, and its standard error small enough to tell that from 0. All else that is off is noise to this:
the rounding of the dtype, and that of inputs, where an engine rounds them too. Of several formats that fit, the one
with the largest coefficient in standard errors is named, if that is beyond Student's limit for so many tokens.

The standard error is that of a sum of products with signs by chance, :math:`\sqrt{\sum f^2 r^2} / \sum f^2` with r what
remains of d, and, from four texts on, at least the one between texts, whose tokens have errors in common. d and f are
in units of what rounding explains at each token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from consistency.extras.serving.check_text.alternatives import AskedText, Explained, Extent
from consistency.extras.serving.check_text.computed_in_parts import can_disable
from consistency.extras.serving.check_text.judged_text import JudgedText, TokenFigures
from consistency.extras.serving.check_text.judging import dtype_of
from consistency.extras.serving.engine_outputs.explanations import merges
from consistency.extras.serving.engine_outputs.passes import Change
from consistency.extras.serving.engine_outputs.rounded_weights import (
    FINEST,
    FORMATS,
    MergedAndRounded,
    rounded,
    rounded_layers,
)
from consistency.numerics.error_spread import student
from consistency.worker.model.merging import MergeRefusedError

_LEAST_DEVIATIONS = 3.0
"""Standard errors from which on a format is asked of the next text too."""

_MOST_OFF = 3.0
"""Standard errors that a coefficient may be off 1: what exceeds them is something else."""

_EXACT = 0.01
"""Distance of a coefficient from 1 where the standard error is none, as in float32."""

_LEAST_TEXTS = 4
"""Texts from which on errors in common are seen between them."""

_NEAR = 0.1
"""Part of what the finest format moves that log probabilities are off by at least: no format moves much less."""

_SLACK = 0.5
"""Distance of a coefficient from 1 that is always allowed: where a library makes scales in a half type, its weights are
only in part these. Chosen: torchao's int8 of bfloat16 weights has 0.75."""


@dataclass(slots=True)
class _Candidate:
    """Weights in a format, and what they move in the texts so far.

    Attributes
    ----------
    figures : callable
        Compute the figures of a text with these weights; None where PEFT refuses to merge.
    errors, moved : list of torch.Tensor
        For each text, what its log probabilities are off by, and what these weights move: `(tokens,)`, over what
        rounding explains there.
    extents : list
        How the weights explain each text whole; None where something else is off too.
    """

    name: str
    figures: Callable[[AskedText], TokenFigures | None]
    errors: list[torch.Tensor] = field(default_factory=list)
    moved: list[torch.Tensor] = field(default_factory=list)
    extents: list[Extent | None] = field(default_factory=list)

    def ask(self, asked: AskedText) -> None:
        """Compute a text with these weights, and add what they move."""
        figures = self.figures(asked)
        judged = asked.judged
        wanted = judged.tokens.judged_logprobs
        assert wanted is not None
        is_given = wanted.isfinite()
        unit = judged.allowed_logprobs[is_given]
        own = judged.exact.logprobs[is_given]
        explained: Explained | None = None
        moved = torch.zeros_like(own)
        if figures is not None:
            moved = (figures.logprobs[is_given] - own) / unit
            explained = asked.fits(figures)
        self.errors.append((wanted[is_given] - own) / unit)
        self.moved.append(moved)
        self.extents.append(None if explained is None else explained.extent)

    def coefficient(self) -> tuple[float, float]:
        """Return the coefficient and its standard error; a coefficient of 0 where nothing is moved."""
        errors, moved = torch.cat(self.errors), torch.cat(self.moved)
        total = float(moved.square().sum())
        if total == 0 or not math.isfinite(float(errors.sum())):
            return 0.0, 0.0
        coefficient = float((errors * moved).sum()) / total
        remaining = errors - coefficient * moved
        error = float((moved * remaining).norm()) / total
        if len(self.errors) >= _LEAST_TEXTS:
            sums = [
                float((of_text * (own - coefficient * of_text)).sum())
                for own, of_text in zip(self.errors, self.moved, strict=True)
            ]
            error = max(error, math.hypot(*sums) / total)
        return coefficient, error

    def certainty(self) -> float:
        """Return how many standard errors the coefficient is above 0; 0 where it is far from 1."""
        coefficient, error = self.coefficient()
        if abs(coefficient - 1) > max(_SLACK, _MOST_OFF * error):
            return 0.0
        return coefficient / error if error else math.inf

    def is_certain(self) -> bool:
        """Report whether chance is no reason for the coefficient: it takes two tokens at least."""
        freedom = sum(map(len, self.errors)) - 1
        return freedom > 0 and self.certainty() > student(freedom)

    def is_all(self) -> bool:
        """Report whether nothing else is off: each text is explained, and the coefficient is 1."""
        coefficient, error = self.coefficient()
        return None not in self.extents and abs(coefficient - 1) <= max(_EXACT, _MOST_OFF * error)


def told_weights(asked: Sequence[AskedText]) -> Explained | None:
    """Return the weights in few bits that texts were written with; None where none is certain.

    Only texts with log probabilities tell: such weights turn few tokens, as rounding does.
    """
    if not asked or any(each.judged.tokens.judged_logprobs is None for each in asked):
        return None
    candidates = _candidates(asked[0].judged)
    if not candidates or _are_too_near(asked[0], candidates):
        return None
    for each in asked:
        for candidate in candidates:
            candidate.ask(each)
        candidates = [candidate for candidate in candidates if candidate.certainty() >= _LEAST_DEVIATIONS]
    likeliest = max(candidates, key=_Candidate.certainty, default=None)
    if likeliest is None or not likeliest.is_certain():
        return None
    if not likeliest.is_all():
        return Explained(extent=Extent.LOGPROBS, about=(f"{likeliest.name}, and other errors besides",))
    are_greedy = set(likeliest.extents) == {Extent.TOKENS}
    return Explained(extent=Extent.TOKENS if are_greedy else Extent.LOGPROBS, about=(likeliest.name,))


def _are_too_near(asked: AskedText, candidates: Sequence[_Candidate]) -> bool:
    r"""Report whether log probabilities are so near to the model's that no format has written them.

    A coefficient is at most :math:`\lVert d \rVert / \lVert f \rVert` (Cauchy and Schwarz). One pass with the format
    that moves least tells that of texts in float32 that are right.
    """
    (finest,) = (candidate for candidate in candidates if candidate.name == FINEST.name)
    finest = replace(finest, errors=[], moved=[], extents=[])
    finest.ask(asked)
    return not float(finest.errors[0].norm()) > _NEAR * float(finest.moved[0].norm())


def _candidates(judged: JudgedText) -> list[_Candidate]:
    """Return all formats, of the base's weights and of their sums with the adapter."""
    model = judged.passes.model
    if not rounded_layers(model):
        return []
    candidates = []
    for weights in FORMATS:
        change = functools.partial(rounded, model, weights)

        def of_base(asked: AskedText, name: str = weights.name, change: Callable[[], Change] = change) -> TokenFigures:
            return asked.judged.figures(asked.judged.passes.of(f"weights in {name}", change))

        candidates.append(_Candidate(weights.name, of_base))
        if not can_disable(model) or not merges(model):
            continue
        merge = MergedAndRounded(dtype=getattr(torch, dtype_of(model)), weights=weights)

        def of_sums(asked: AskedText, merge: MergedAndRounded = merge) -> TokenFigures | None:
            with suppress(MergeRefusedError):
                return asked.judged.figures(asked.judged.passes.merged(merge))
            return None

        candidates.append(_Candidate(f"{weights.name}, rounded after the adapter was merged", of_sums))
    return candidates
