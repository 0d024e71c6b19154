"""One text judged in float64: the gap and the log probability of each token, and what rounding may do to them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from consistency.case.budget.costs import LEAST_PASSES, MOST_PASSES
from consistency.devices.products import Products
from consistency.errors import InputError
from consistency.extras.serving.check_text.arithmetic import OWN, EngineArithmetic, log_softmax_error
from consistency.extras.serving.check_text.penalties import penalized
from consistency.extras.serving.check_text.processing import Logits, Processing
from consistency.extras.serving.check_text.report import LogprobGap, TokenGap
from consistency.extras.serving.check_text.sampling import NO_PENALTIES, Sampling
from consistency.extras.serving.check_text.texts import Tokens, other_tokens
from consistency.extras.serving.engine_outputs.passes import Change, Passes, Room
from consistency.extras.serving.inference.request import OUTPUT
from consistency.numerics.decision import CONTINUOUS, Decision
from consistency.numerics.error_spread import Spread
from consistency.worker.cpu_error import with_noise
from consistency.worker.model import half_kernels
from consistency.worker.model.running import Activations, activations, base_of

Step = Callable[[str], None]

_MOST_DIVISIONS = 16
"""Tries to divide one text otherwise into tokens."""


_NEAR = 32.0
"""Ratio up to which a mistake is judged by the rounding that it makes itself."""

_FAR = 10.0
"""Times the largest error that rounding explains of the model's own log probabilities, from which on no sampler makes
an error of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    r"""What one pass says of each token of a text.

    Attributes
    ----------
    gaps : torch.Tensor
        `(tokens,)`: logit of the largest token minus that of the token that was written.
    logprobs : torch.Tensor
        `(tokens,)`: log probability of the token, as the model's own.
    margins : torch.Tensor
        `(tokens,)`: the largest logit minus the second.
    largest : torch.Tensor
        `(tokens,)`: ids of the largest logits, the end of the text ruled out where the text goes on.
    weights : torch.Tensor
        `(tokens,)`: by how much independent errors of equal size in all logits move the log probability, in units of
        that size: the root of :math:`(1 - p)^2 + \sum q^2`, with p the token's probability and q the others'.
    past_end : int
        Tokens in whose place the model would have ended the text.
    vocabulary : int
        Number of tokens that each probability is one of.
    """

    gaps: torch.Tensor
    logprobs: torch.Tensor
    margins: torch.Tensor
    largest: torch.Tensor
    weights: torch.Tensor
    past_end: int
    vocabulary: int

    @classmethod
    def of(cls, logits: Logits, chosen: torch.Tensor, ends: tuple[int, ...]) -> TokenFigures:
        """Return the figures of logits; `ends` are the ids that end a text."""
        two_values, two_ids = logits.without_ends.topk(2, -1)
        largest = two_ids[:, 0]
        gaps = two_values[:, 0] - _at(logits.choosing, chosen)
        logprobs = logits.own.log_softmax(-1)
        probabilities = logprobs.exp()
        own = _at(probabilities, chosen)
        weights = (1 - 2 * own + probabilities.square().sum(-1)).clamp_min(0).sqrt()
        goes_on = ~are_ends(chosen, ends)
        past_end = sum(token in ends for token in logits.choosing.argmax(-1)[goes_on].tolist())
        return cls(
            gaps=gaps,
            logprobs=_at(logprobs, chosen),
            margins=two_values[:, 0] - two_values[:, 1],
            largest=largest,
            weights=weights,
            past_end=past_end,
            vocabulary=logits.own.shape[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedText:
    """A text, its exact figures, and what rounding may do to them.

    Attributes
    ----------
    passes : Passes
        Float64 passes over the text, with and without mistakes.
    exact : TokenFigures
        The figures of the float64 pass of the model as it is.
    gap_spread, logprob_spread : Spread
        Error that rounding makes in the gap and in the log probability of each token, `(tokens, 1)`.
    noisy_logprobs : torch.Tensor
        `(passes, tokens)`: log probabilities in passes with noise.
    decides : bool
        The model makes decisions, such as a router's, which rounding may turn.
    arithmetic : EngineArithmetic
        How the writer computes, whose rounding is allowed.
    """

    tokens: Tokens
    passes: Passes
    exact: TokenFigures
    gap_spread: Spread
    logprob_spread: Spread
    noisy_logprobs: torch.Tensor
    decides: bool
    arithmetic: EngineArithmetic = OWN

    @classmethod
    def of(
        cls,
        model: Any,
        tokens: Tokens,
        tokenizer: Any,
        step: Step,
        arithmetic: EngineArithmetic = OWN,
        *,
        room: Room | None = None,
    ) -> JudgedText:
        """Judge a text; where it is impossible, in other tokens too, if these are not the writer's own."""
        for _ in range(_MOST_DIVISIONS):
            judged = cls._in_these_tokens(model, tokens, step, arithmetic, room or Room())
            place = judged.first_impossible
            if place is None:
                break
            largest = int(judged.exact.largest[place])
            divided_otherwise = next(other_tokens(tokens, judged.places[place], largest, tokenizer), None)
            if divided_otherwise is None:
                break
            tokens = divided_otherwise
        return judged

    @classmethod
    def _in_these_tokens(
        cls, model: Any, tokens: Tokens, step: Step, arithmetic: EngineArithmetic, room: Room
    ) -> JudgedText:
        inputs = inputs_of(model, tokens)
        chosen, ends = chosen_ids(tokens), end_ids(model)
        decisions: list[str] = []

        def note(decision: Decision) -> None:
            decisions.append(decision.name)

        # the exact pass first: it says between which tokens the gaps are, and whether the model decides
        step("float64")
        passes = Passes(model=model, inputs=inputs, watch=lambda: note, step=step, room=room)
        logits = logits_of(passes.of("right", nullcontext), tokens, ends)
        exact = TokenFigures.of(logits, chosen, ends)
        compared = _Compared.of(logits, exact, chosen)
        right = compared.figures(logits)
        del logits  # of `(tokens, vocabulary)` in float64, which the passes with noise need room for
        decides = any(name not in CONTINUOUS for name in decisions)
        # a mistake may have a router choose otherwise, so passes with one decide by themselves
        free = passes.deciding_freely(decides=decides)
        unjudged = _Unjudged(tokens=tokens, passes=free, exact=exact, compared=compared, right=right, decides=decides)
        return unjudged.judged_in(arithmetic)

    def in_arithmetic(self, arithmetic: EngineArithmetic) -> JudgedText:
        """Return the same text as judged by the rounding of another arithmetic."""
        logits = self.logits()
        compared = _Compared.of(logits, self.exact, self.chosen)
        right = compared.figures(logits)
        del logits
        unjudged = _Unjudged(
            tokens=self.tokens,
            passes=self.passes,
            exact=self.exact,
            compared=compared,
            right=right,
            decides=self.decides,
        )
        return unjudged.judged_in(arithmetic)

    def under(
        self, change: Callable[[], Change], inputs: Activations | None = None, tokens: Tokens | None = None
    ) -> JudgedText:
        """Return the same text as judged by a model with a mistake, and by what rounding does there.

        Parameters
        ----------
        change : callable
            The mistake.
        inputs, tokens : optional
            Other inputs of the model, and the text as they have it.
        """
        passes = Passes(
            model=self.passes.model,
            inputs=self.passes.inputs if inputs is None else inputs,
            watch=lambda: None,
            step=self.passes.step,
            change=change,
        )
        tokens = self.tokens if tokens is None else tokens
        ends = end_ids(passes.model)
        logits = logits_of(passes.of("right", change), tokens, ends)
        exact = TokenFigures.of(logits, self.chosen, ends)
        compared = _Compared.of(logits, exact, self.chosen)
        unjudged = _Unjudged(
            tokens=tokens,
            passes=passes,
            exact=exact,
            compared=compared,
            right=compared.figures(logits),
            decides=self.decides,
        )
        return unjudged.judged_in(self.arithmetic)

    @property
    def places(self) -> list[int]:
        """Places in the text of the tokens that are judged, from 0 on."""
        return self.tokens.judged_places

    @property
    def chosen(self) -> torch.Tensor:
        """Ids of the tokens that are judged, `(tokens,)`."""
        return chosen_ids(self.tokens)

    @property
    def allowed_gaps(self) -> torch.Tensor:
        """Largest gap that rounding explains, `(tokens,)`."""
        return self.gap_spread.allowed(self.exact.gaps[:, None], torch.float32)[:, 0]

    @property
    def allowed_logprobs(self) -> torch.Tensor:
        """Largest error of a log probability that rounding explains, with that of its digits, `(tokens,)`."""
        return self._allowed_of(self.exact.logprobs)

    def _allowed_of(self, logprobs: torch.Tensor) -> torch.Tensor:
        return self._allowed_by_passes(logprobs) + self.rounding_of_all

    def _allowed_by_passes(self, logprobs: torch.Tensor) -> torch.Tensor:
        return self.logprob_spread.allowed(logprobs[:, None], torch.float32)[:, 0]

    @property
    def allowed_of_logits(self) -> torch.Tensor:
        """Largest error of a log probability that comes from rounding in its logits, `(tokens,)`."""
        return self._allowed_by_passes(self.exact.logprobs)

    @property
    def rounding_of_all(self) -> float:
        """Largest error of each log probability alike: of its digits in the file, and of the sum of a softmax."""
        return self.tokens.logprob_rounding + log_softmax_error(self.exact.vocabulary)

    @property
    def first_impossible(self) -> int | None:
        """Number of the first token whose gap rounding does not explain, among those that are judged; None for none."""
        outside = (self.exact.gaps > self.allowed_gaps).nonzero()[:, 0].tolist()
        return outside[0] if outside else None

    @property
    def is_greedy(self) -> bool:
        """Report whether each token is the most likely one, but for rounding."""
        return self.first_impossible is None

    @property
    def logprob_ratios(self) -> torch.Tensor | None:
        """Error of each log probability over what rounding may do, `(tokens,)`; None where none came with the text.

        Zero where that of a token was not given.
        """
        wanted = self.tokens.judged_logprobs
        if wanted is None:
            return None
        return _ratios(wanted, self.exact.logprobs, self.allowed_logprobs)

    @property
    def trainer_ratio(self) -> float | None:
        """The largest error of the trainer's log probabilities over what rounding may do; None where it has none."""
        wanted = self.tokens.judged_trainer_logprobs
        if wanted is None:
            return None
        return float(_ratios(wanted, self.exact.logprobs, self.allowed_logprobs).max())

    def token_gap(self, number: int, tokenizer: Any) -> TokenGap:
        """Return the token of a number beside the one with the largest logit, in words where there is a tokenizer."""
        token_id, largest_id = int(self.chosen[number]), int(self.exact.largest[number])
        text, largest_text = "", ""
        if tokenizer is not None:
            text, largest_text = tokenizer.decode([token_id]), tokenizer.decode([largest_id])
        return TokenGap(
            token=self.places[number] + 1,
            id=token_id,
            largest_id=largest_id,
            gap=float(self.exact.gaps[number]),
            allowed=float(self.allowed_gaps[number]),
            text=text,
            largest_text=largest_text,
        )

    def worst_logprob(self) -> LogprobGap | None:
        """Return the log probability with the largest ratio; None where none came with the text."""
        ratios, wanted = self.logprob_ratios, self.tokens.judged_logprobs
        if ratios is None or wanted is None:
            return None
        number = int(ratios.nan_to_num(math.inf).argmax())
        return LogprobGap(
            token=self.places[number] + 1,
            given=float(wanted[number]),
            exact=float(self.exact.logprobs[number]),
            allowed=float(self.allowed_logprobs[number]),
        )

    # ---- the same tokens under a mistake

    def figures(self, logits: torch.Tensor, tokens: Tokens | None = None) -> TokenFigures:
        """Return the figures of exact logits of a model with a mistake, `(1, length, vocabulary)`."""
        ends = end_ids(self.passes.model)
        return TokenFigures.of(logits_of(logits, tokens or self.tokens, ends), self.chosen, ends)

    def fit_greedily(self, figures: TokenFigures) -> torch.Tensor:
        """Report for each token whether it would be the most likely one, but for rounding, `(tokens,)`."""
        return figures.gaps <= self.gap_spread.allowed(figures.gaps[:, None], torch.float32)[:, 0]

    def fit_logprobs(self, figures: TokenFigures) -> torch.Tensor:
        """Report for each token whether its log probability would be the one that came with the text, `(tokens,)`."""
        ratios = self._ratios_of(figures)
        return torch.ones_like(figures.gaps, dtype=torch.bool) if ratios is None else ratios <= 1

    def is_nearer(self, figures: TokenFigures) -> bool:
        """Report whether log probabilities are nearer to these figures as a whole than to the model's own.

        A change of the model that explains nothing may bring a single token within its bound by chance, and moves the
        others away.
        """
        changed, own = self._ratios_of(figures), self._ratios_of(self.exact)
        return changed is None or own is None or bool(changed.square().sum() < own.square().sum())

    def is_near(self, figures: TokenFigures) -> bool:
        """Report whether log probabilities are a hundred times nearer to these figures than to the model's own.

        They may still be beyond what rounding makes of the model's own: a mistake can make more of it.
        """
        changed, own = self._ratios_of(figures), self._ratios_of(self.exact)
        if changed is None or own is None:
            return False
        return bool(changed.max() <= _NEAR) and bool(own.max() >= 100 * changed.max())

    def _ratios_of(self, figures: TokenFigures) -> torch.Tensor | None:
        """Return errors over what rounding may do, `(tokens,)`; None where no log probability came with the text."""
        wanted = self.tokens.judged_logprobs
        if wanted is None:
            return None
        return _ratios(wanted, figures.logprobs, self._allowed_of(figures.logprobs))

    def logits(self, penalties: Sampling = NO_PENALTIES) -> Logits:
        """Return the exact logits; they are computed again where they are not kept.

        Parameters
        ----------
        penalties : Sampling, optional
            Penalties to choose tokens by in place of those that are stated.
        """
        tokens = penalized_by(penalties, self.tokens)
        return logits_of(self.passes.of("right", nullcontext), tokens, end_ids(self.passes.model))

    def logits_by_penalties(self, several: Sequence[Sampling]) -> Iterator[tuple[Sampling, Logits]]:
        """Yield the exact logits by which tokens are chosen with each of several penalties."""
        own, ends = self.logits().own, end_ids(self.passes.model)
        for penalties in several:
            yield penalties, _after_penalties(own, replace(self.tokens, penalties=penalties), ends)

    def figures_of(self, logits: Logits) -> TokenFigures:
        """Return the figures of exact logits."""
        return TokenFigures.of(logits, self.chosen, end_ids(self.passes.model))

    def ratio_of_processing(self, processing: Processing, step: Step) -> float:
        """Return the largest error of the log probabilities, taken in this way, over what rounding may do."""
        wanted = self.tokens.judged_logprobs
        assert wanted is not None
        kept: torch.Tensor | None = None
        tokens = penalized_by(processing.sampling, self.tokens)
        logits = self.logits(processing.sampling)
        if processing.sampling.leaves_out:
            slack = self.allowed_logprobs / min(1.0, processing.sampling.temperature)
            kept = processing.kept(logits, self.chosen, wanted, slack)
        exact = processing.logprobs(logits, self.chosen, kept)
        del logits
        known = processing.transcription.is_known(len(wanted))
        if not bool(known.any()):
            return math.inf
        wanted = torch.where(known, wanted, math.nan)
        exact = exact.masked_fill(~known[:, None], 0.0)
        rounding = processing.transcription.rounding(exact[:, 0]) + self.rounding_of_all
        # passes with noise take long, so what is far outside is told by the noise of the model's own log probabilities
        widest = self.allowed_logprobs.max() / min(1.0, processing.sampling.temperature) + rounding
        far = float(_ratios(wanted, exact[:, 0], _FAR * widest).max())
        if not far <= 1:
            return _FAR * far

        def read(noisy_logits: Logits) -> torch.Tensor:
            return processing.logprobs(noisy_logits, self.chosen, kept).masked_fill(~known[:, None], 0.0)

        noisy = _noisy_figures(self.passes, tokens, read, len(self.noisy_logprobs), step, self.arithmetic)
        allowed = _spread(noisy, exact).allowed(exact, torch.float32)[:, 0] + rounding
        return float(_ratios(wanted, exact[:, 0], allowed).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """The two tokens whose logits make the gap in each place: the largest one, and the one that was written.

    Where these are one, the gap is to the second largest, or its spread would be none.
    """

    chosen: torch.Tensor
    largest: torch.Tensor
    other: torch.Tensor

    @classmethod
    def of(cls, logits: Logits, exact: TokenFigures, chosen: torch.Tensor) -> _Compared:
        """Return the tokens that exact logits compare."""
        second = logits.without_ends.topk(2, -1).indices[:, 1]
        return cls(chosen=chosen, largest=exact.largest, other=torch.where(chosen == exact.largest, second, chosen))

    def figures(self, logits: Logits) -> torch.Tensor:
        """Return gap and log probability of each token, `(tokens, 2)`."""
        gaps = _at(logits.choosing, self.largest) - _at(logits.choosing, self.other)
        return torch.stack([gaps, _at(logits.own.log_softmax(-1), self.chosen)], 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unjudged:
    """A text with its exact figures, of which it is not known yet what rounding may do to them.

    Attributes
    ----------
    right : torch.Tensor
        Exact gap and log probability of each token, `(tokens, 2)`.
    """

    tokens: Tokens
    passes: Passes
    exact: TokenFigures
    compared: _Compared
    right: torch.Tensor
    decides: bool

    def judged_in(self, arithmetic: EngineArithmetic) -> JudgedText:
        """Return the text with what rounding may do in an arithmetic."""
        passes = self.passes
        count = MOST_PASSES if self.decides else LEAST_PASSES
        noisy = _noisy_figures(passes, self.tokens, self.compared.figures, count, passes.step, arithmetic)
        gap_spread, logprob_spread = (_spread([each[:, [n]] for each in noisy], self.right[:, [n]]) for n in range(2))
        return JudgedText(
            tokens=self.tokens,
            passes=passes,
            exact=self.exact,
            gap_spread=gap_spread,
            logprob_spread=logprob_spread,
            noisy_logprobs=torch.stack([each[:, 1] for each in noisy]),
            decides=self.decides,
            arithmetic=arithmetic,
        )


def _noisy_figures(
    passes: Passes,
    tokens: Tokens,
    figures: Callable[[Logits], torch.Tensor],
    count: int,
    step: Step,
    arithmetic: EngineArithmetic,
) -> list[torch.Tensor]:
    """Return figures of passes with random rounding errors in the writer's arithmetic."""
    model = passes.model
    ends = end_ids(model)

    def compute(seed: int) -> torch.Tensor:
        step(f"with noise ({seed + 1} of {count})")
        with passes.change(), arithmetic.of_parameters(model):
            kernels = half_kernels.replacement(model, len(tokens.prompt) + len(tokens.ids))
            # the cache inside the noise: it has to see keys and values before attention is computed otherwise
            with half_kernels.computing(kernels), with_noise(Products(), seed), arithmetic.of_cache(seed):
                return activations(model, passes.inputs)[OUTPUT]

    noisy = []
    for seed in range(count):
        if tokens.judged_logprobs is None:  # nothing asks for these logits again
            logits = compute(seed)
        else:
            logits = passes.with_noise(f"{arithmetic}, noise {seed}", functools.partial(compute, seed))
        noisy.append(figures(logits_of(logits, tokens, ends)))
    return noisy


def penalized_by(sampling: Sampling, tokens: Tokens) -> Tokens:
    """Return a text as chosen with the penalties of a sampler, and by those that are stated where it has none."""
    return replace(tokens, penalties=sampling.penalties) if sampling.penalizes else tokens


def _spread(noisy: Sequence[torch.Tensor], exact: torch.Tensor) -> Spread:
    return Spread.of([each.to(torch.float32) for each in noisy], exact.contiguous())


def _ratios(wanted: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return errors over what is allowed; 0 where a log probability was not given (NaN)."""
    return torch.where(wanted.isnan(), 0.0, (wanted - exact).abs() / allowed)


def _at(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return of each row the value at an id, `(tokens,)`."""
    return values.gather(1, ids[:, None])[:, 0]


def inputs_of(model: Any, tokens: Tokens) -> Activations:
    """Return the model's inputs for a text: the last rows of its logits have chosen the tokens."""
    config = getattr(base_of(model), "config", None)
    has_encoder = getattr(config, "is_encoder_decoder", False)
    if not has_encoder:
        ids = torch.tensor([[*tokens.prompt, *tokens.ids[:-1]]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = 0
    ids = torch.tensor([tokens.prompt])
    decoder_ids = torch.tensor([[start, *tokens.ids[:-1]]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": decoder_ids}


def chosen_ids(tokens: Tokens) -> torch.Tensor:
    """Return the ids of the tokens that are judged, `(tokens,)`."""
    return torch.tensor([tokens.ids[place] for place in tokens.judged_places])


def logits_of(output: torch.Tensor, tokens: Tokens, ends: tuple[int, ...]) -> Logits:
    """Return the logits that chose each token that is judged, in float64, from a model's output.

    Raises
    ------
    InputError
        The text has a token that the model has no logit for.
    """
    of_text = output[0, -len(tokens.ids) :]
    chosen = chosen_ids(tokens)
    if int(chosen.max()) >= of_text.shape[-1]:
        raise InputError("the text has a token that the model has no logit for", got=int(chosen.max()))
    own = of_text[tokens.judged_places].to(torch.float64)
    return _after_penalties(own, tokens, ends)


def _after_penalties(own: torch.Tensor, tokens: Tokens, ends: tuple[int, ...]) -> Logits:
    """Return a model's own logits, `(tokens, vocabulary)`, beside those that tokens are chosen by."""
    choosing = penalized(own, tokens.prompt, tokens.ids, tokens.judged_places, tokens.penalties, ends)
    chosen = chosen_ids(tokens)
    goes_on = ~are_ends(chosen, ends)
    known_ends = [end for end in ends if end < own.shape[-1]]
    if not known_ends or not bool(goes_on.any()):
        return Logits(own=own, choosing=choosing, without_ends=choosing)
    without_ends = choosing.clone()
    for end in known_ends:
        without_ends[goes_on, end] = -math.inf
    return Logits(own=own, choosing=choosing, without_ends=without_ends)


def end_ids(model: Any) -> tuple[int, ...]:
    """Return the ids that end a text: of the generation config, else of the model's config."""
    base = base_of(model)
    for config in (getattr(base, "generation_config", None), getattr(base, "config", None)):
        end = getattr(config, "eos_token_id", None)
        if isinstance(end, list):
            return tuple(end)
        if end is not None:
            return (int(end),)
    return ()


def are_ends(chosen: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    """Report for each token whether it ends a text."""
    return torch.isin(chosen, torch.tensor(ends, dtype=chosen.dtype))
