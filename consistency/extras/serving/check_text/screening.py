"""Many texts: those that need no float64 are told by one pass of the model in its own dtype.

A pass in the model's dtype is a healthy device's answer. A text whose log probabilities differ from it by no more than
two healthy devices' commonly do, and whose tokens are the largest there, is right. How far they commonly differ is
taken from a sample of texts that are judged in float64: of independent errors of equal size in all logits, a log
probability has the error of its weight (`TokenFigures.weights`) times that size, and the size is the median of what the
sample's tokens are allowed in units of their weights. Every other text is judged in float64 by its own noise, so the
screen accuses nobody.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from consistency.extras.serving.check_text.arithmetic import log_softmax_error
from consistency.extras.serving.check_text.judged_text import (
    JudgedText,
    TokenFigures,
    chosen_ids,
    end_ids,
    inputs_of,
    logits_of,
)
from consistency.extras.serving.check_text.processing import Logits, Processing
from consistency.extras.serving.check_text.texts import Tokens
from consistency.extras.serving.check_text.transcription import Transcription
from consistency.extras.serving.inference.request import OUTPUT
from consistency.worker.model import half_kernels
from consistency.worker.model.running import activations

_LEAST_WEIGHT = 1e-6
"""Smallest weight that sizes are taken in units of: of a certain token nothing is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """A text in one pass of the model in its own dtype.

    Attributes
    ----------
    by_processing : dict
        Log probabilities of the same pass that were taken in another way, `(tokens,)`.
    transcription : Transcription
        What became of the log probabilities that came with the text.
    """

    tokens: Tokens
    figures: TokenFigures
    by_processing: Mapping[Processing, torch.Tensor] = field(default_factory=dict)
    transcription: Transcription = Transcription.AS_THEY_ARE

    def taken_by(self, processing: Processing) -> PlainText | None:
        """Return the text with its log probabilities taken in another way; None where these are not known."""
        if processing not in self.by_processing:
            return None
        figures = replace(self.figures, logprobs=self.by_processing[processing])
        return replace(self, figures=figures, transcription=processing.transcription)

    @property
    def differences(self) -> torch.Tensor | None:
        """The log probabilities that came with the text minus those of the pass, `(tokens,)`; None without any."""
        wanted = self.tokens.judged_logprobs
        if wanted is None:
            return None
        return wanted - self.figures.logprobs

    @property
    def trainer_differences(self) -> torch.Tensor | None:
        """The trainer's log probabilities minus those of the pass, `(tokens,)`; None where the text has none."""
        wanted = self.tokens.judged_trainer_logprobs
        if wanted is None:
            return None
        return wanted - self.figures.logprobs


def plain_logits(model: Any, tokens: Tokens, change: AbstractContextManager[Any] | None = None) -> Logits:
    """Return the logits of a text in one pass of the model in its own dtype, with a change of the model if given."""
    kernels = half_kernels.replacement(model, len(tokens.prompt) + len(tokens.ids))
    with torch.no_grad(), change or nullcontext(), half_kernels.computing(kernels):
        output = activations(model, inputs_of(model, tokens))[OUTPUT]
    return logits_of(output, tokens, end_ids(model))


def plain_text(
    model: Any,
    tokens: Tokens,
    change: AbstractContextManager[Any] | None = None,
    also_by: Processing | None = None,
) -> PlainText:
    """Compute a text in one pass of the model in its own dtype.

    Parameters
    ----------
    change : context manager, optional
        A change of the model, such as another adapter.
    also_by : Processing, optional
        Another way in which log probabilities are taken, besides the model's own.
    """
    logits, chosen = plain_logits(model, tokens, change), chosen_ids(tokens)
    figures = TokenFigures.of(logits, chosen, end_ids(model))
    by_processing = {} if also_by is None else {also_by: also_by.logprobs(logits, chosen)[:, 0]}
    return PlainText(tokens=tokens, figures=figures, by_processing=by_processing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What two healthy passes of a model in its dtype commonly differ by.

    Attributes
    ----------
    logprob, gap : float
        What rounding commonly may do to a log probability, in units of its weight, and to a gap.
    deviation : float
        Standard deviation of what rounding does to a log probability, in units of its weight.
    """

    logprob: float
    gap: float
    deviation: float

    @classmethod
    def of(cls, sample: Sequence[JudgedText]) -> Screen:
        """Take the sizes from texts that are judged in float64."""
        logprobs, gaps = list[float](), list[float]()
        squares = weights = 0.0
        for judged in sample:
            errors = judged.noisy_logprobs - judged.exact.logprobs
            squares += float(errors.square().mean(0).sum())
            weights += float(judged.exact.weights.square().sum())
            sizes = judged.allowed_of_logits / judged.exact.weights.clamp_min(_LEAST_WEIGHT)
            logprobs += sizes[judged.exact.weights > _LEAST_WEIGHT].tolist()
            gaps += judged.allowed_gaps.tolist()
        return cls(
            logprob=statistics.median(logprobs or [0.0]),
            gap=statistics.median(gaps or [0.0]),
            deviation=math.sqrt(squares / max(weights, _LEAST_WEIGHT)),
        )

    def gap_ratios(self, plain: PlainText) -> torch.Tensor:
        """Return each gap over what two healthy passes commonly differ by, `(tokens,)`."""
        return plain.figures.gaps / (2 * self.gap + _TINY)

    def logprob_ratios(self, plain: PlainText) -> torch.Tensor | None:
        """Return each difference over what two healthy passes commonly differ by, `(tokens,)`; None without any."""
        differences = plain.differences
        if differences is None:
            return None
        return self._ratios_of_differences(differences, plain)

    def error_of_all(self, plain: PlainText) -> float:
        """Return the largest error that all log probabilities of a text may have alike."""
        return plain.tokens.logprob_rounding + log_softmax_error(plain.figures.vocabulary)

    def _ratios_of_differences(self, differences: torch.Tensor, plain: PlainText) -> torch.Tensor:
        of_all = plain.tokens.logprob_rounding + log_softmax_error(plain.figures.vocabulary)
        allowed = (
            2 * self.logprob * plain.figures.weights + of_all + plain.transcription.rounding(plain.figures.logprobs)
        )
        return differences.abs().nan_to_num(0.0, torch.inf, torch.inf) / allowed

    def trainer_ratio(self, plain: PlainText) -> float | None:
        """Return the largest ratio of the trainer's log probabilities; None where the text has none."""
        differences = plain.trainer_differences
        if differences is None:
            return None
        return float(self._ratios_of_differences(differences, plain).max())

    def ratio(self, plain: PlainText) -> float:
        """Return the largest ratio of a text: over 1 it has to be judged in float64.

        Where log probabilities came with it, these alone are asked: the tokens may have been sampled.
        """
        ratios = self.logprob_ratios(plain)
        if ratios is None:
            ratios = self.gap_ratios(plain)
        return max(float(ratios.max()), self.trainer_ratio(plain) or 0.0)


_TINY = 1e-12
"""Difference that nobody asks about: of a token that is certain both passes have a log probability of zero, nearly."""
