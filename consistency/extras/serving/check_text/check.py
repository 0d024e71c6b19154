"""Check whether a model could have written a text: each token's exact logit against the largest.

A writer that always takes the most likely token takes another one only where rounding has put it above. So the gap of
each token to the largest logit is computed in float64, and what rounding may do to that gap by passes with random
rounding errors in the dtype that the writer is said to have used. A text that is impossible is held against the
mistakes that an engine makes with an adapter: each is a pass in float64, and is named where it would have written every
such text.

Where log probabilities are given, they are judged by themselves: whether the tokens are possible and whether the log
probabilities are the model's are two statements. Of a sampled text, whose tokens are not the most likely ones, they are
what tells that the model computed it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from consistency.case.budget.costs import LEAST_PASSES, MOST_PASSES
from consistency.case.case import Case
from consistency.case.recognition import has_tokenizer
from consistency.devices.products import Products
from consistency.errors import InputError
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.logprobs import LogprobWay, ways_of
from consistency.extras.serving.check_text.report import LogprobGap, TextReport, TextResult, TokenGap, Verdict
from consistency.extras.serving.check_text.texts import Text, Tokens, encoded, other_tokens
from consistency.extras.serving.engine_outputs.explanations import merges, mistakes
from consistency.extras.serving.engine_outputs.passes import Passes
from consistency.extras.serving.inference.request import OUTPUT
from consistency.numerics.decision import CONTINUOUS, Decision
from consistency.numerics.dtype import name_of
from consistency.numerics.error_spread import Spread
from consistency.worker.cpu_error import with_noise
from consistency.worker.model import half_kernels
from consistency.worker.model.inputs import tokenizer_of
from consistency.worker.model.loading import load_model
from consistency.worker.model.merging import MergeRefusedError
from consistency.worker.model.running import Activations, activations, base_of, model_code
from consistency.worker.recorder import Skip

Step = Callable[[str], None]

_MOST_DIVISIONS = 16
"""Tries to divide one text otherwise into tokens."""

_MOST_EXPLAINED = 2
"""Impossible texts that a mistake is held against."""


def check_text(case: Case, texts: Sequence[Text], *, step: Step | None = None) -> TextReport:
    """Check whether the model of a case could have written texts.

    Parameters
    ----------
    texts : sequence of Text
        Each written greedily, without penalties or constraints; or sampled, with log probabilities.
    step : callable
        Called with the name of the next step.

    Raises
    ------
    InputError
        A text cannot be used, or the model does not run.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries about themselves
        return _checked(case, texts, step or (lambda _: None))


def _checked(case: Case, texts: Sequence[Text], step: Step) -> TextReport:
    step("load")
    model = load_model(case, "cpu")
    tokenizer = None
    if case.factory is None and has_tokenizer(Path(case.base)):
        tokenizer = tokenizer_of(case.base)
    tokens_of_texts = [encoded(text, tokenizer, f"text {number}") for number, text in enumerate(texts, 1)]
    try:
        with model_code(model):
            return _judge_texts(case, model, tokens_of_texts, tokenizer, step)
    except Skip as why:
        raise InputError("the model does not run on these texts", where=case.base, got=str(why)) from why


def _judge_texts(case: Case, model: Any, tokens_of_texts: Sequence[Tokens], tokenizer: Any, step: Step) -> TextReport:
    """Judge every text by itself, and then look for a mistake that explains those that are wrong."""
    judged_texts = []
    for number, tokens in enumerate(tokens_of_texts, 1):
        step_of_text = functools.partial(_announce, step, f"text {number} of {len(tokens_of_texts)}")
        judged_texts.append(_JudgedText.of(model, tokens, tokenizer, step_of_text))
    report = TextReport(dtype=_dtype_of(model), texts=tuple(judged.result for judged in judged_texts))
    if case.adapter is None:  # without an adapter there is no mistake to make with it
        return report
    unexplained = [judged for judged in judged_texts if judged.result.is_unexplained][:_MOST_EXPLAINED]
    if unexplained:
        return _explain_unexplained(report, unexplained)
    return _explain_sampled(report, judged_texts)


def _announce(step: Step, text: str, name: str) -> None:
    step(f"{text}: {name}")


def _dtype_of(model: torch.nn.Module) -> str:
    return name_of(next(p.dtype for p in model.parameters() if p.is_floating_point()))


def _explain_unexplained(report: TextReport, unexplained: Sequence[_JudgedText]) -> TextReport:
    """Name the mistakes that would have written the texts; else those that would have given the log probabilities."""
    causes = _explained(unexplained, _JudgedText.fits)
    if causes:
        return _with_causes(report, causes)
    if any(judged.tokens.logprobs is None for judged in unexplained):
        return report
    causes = _explained(unexplained, _JudgedText.fits_logprobs)
    if not causes:
        return report
    return msgspec.structs.replace(
        report,
        texts=tuple(_as_sampled(result) for result in report.texts),
        logprob_causes=tuple(cause.value for cause in causes),
    )


def _explain_sampled(report: TextReport, judged_texts: Sequence[_JudgedText]) -> TextReport:
    """Name the mistakes that would have written the sampled texts; else say whether the base alone writes all texts."""
    sampled = [judged for judged in judged_texts if judged.result.verdict == "sampled"][:_MOST_EXPLAINED]
    # where a mistake makes every token the most likely one, the text was written so, and not drawn by chance
    causes = _explained(sampled, _JudgedText.fits)
    if causes:
        return _with_causes(report, causes)
    if any(result.has_other_logprobs for result in report.texts):
        return report
    base_alone = all(
        judged.can_do_without and judged.would_be_written(judged.without_adapter()) for judged in judged_texts
    )
    return msgspec.structs.replace(report, base_alone=base_alone)


def _with_causes(report: TextReport, causes: Sequence[Cause]) -> TextReport:
    """Return a report in which a mistake explains every text that was undecided, or taken for sampled."""
    return msgspec.structs.replace(
        report,
        texts=tuple(_as_impossible(result) for result in report.texts),
        causes=tuple(cause.value for cause in causes),
    )


def _as_impossible(result: TextResult) -> TextResult:
    """Return the result of a text that a mistake explains: impossible where it was undecided, or taken for sampled."""
    if result.verdict not in ("undecided", "sampled"):
        return result
    return msgspec.structs.replace(result, verdict="impossible", reason="")


def _as_sampled(result: TextResult) -> TextResult:
    """Return the result of a text whose log probabilities a mistake explains: nothing is known against its tokens."""
    if result.verdict not in ("impossible", "undecided"):
        return result
    return msgspec.structs.replace(result, verdict="sampled" if result.unlikely else "possible", reason="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedText:
    """A text, its result, and the passes and errors that further logits are held against it with.

    Attributes
    ----------
    gap_spread, logprob_spread : Spread
        Error that rounding makes in the gap and in the log probability of each token, `(tokens, 1)`.
    """

    tokens: Tokens
    passes: Passes
    gap_spread: Spread
    logprob_spread: Spread
    result: TextResult

    @classmethod
    def of(cls, model: Any, tokens: Tokens, tokenizer: Any, step: Step) -> _JudgedText:
        """Judge a text; where it is impossible, in other tokens too, if these are not the writer's own."""
        for _ in range(_MOST_DIVISIONS):
            judged = cls._judge(model, tokens, tokenizer, step)
            worst = judged.result.worst
            if worst is None or worst.gap <= worst.allowed:
                break
            divided_otherwise = next(other_tokens(tokens, worst.token - 1, worst.largest_id, tokenizer), None)
            if divided_otherwise is None:
                break
            tokens = divided_otherwise
        return judged

    @classmethod
    def _judge(cls, model: Any, tokens: Tokens, tokenizer: Any, step: Step) -> _JudgedText:
        """Judge a text in the tokens that it is given in."""
        inputs = _inputs(model, tokens)
        chosen = torch.tensor(tokens.ids)
        decisions: list[str] = []

        def note(decision: Decision) -> None:
            decisions.append(decision.name)

        # the exact pass first: it says between which tokens the gaps are, and whether the model decides
        step("float64")
        passes = Passes(model=model, inputs=inputs, watch=lambda: note, step=step)
        logits = _logits(passes.of("right", nullcontext), chosen)
        ends = _end_ids(model)
        goes_on = ~_are_ends(chosen, ends)
        past_end = sum(token in ends for token in logits.argmax(-1)[goes_on].tolist())
        without_ends = _without_ends(logits, chosen, ends)
        two_largest = without_ends.topk(2, -1).indices
        largest = two_largest[:, 0]
        # the gap of the largest token is to the second one
        compared = torch.where(chosen == largest, two_largest[:, 1], chosen)
        ways = ways_of(tokens.logprobs, logits, without_ends, chosen)

        def figures(logits: torch.Tensor) -> torch.Tensor:
            """Return the gap of each token, and its log probability in each way, `(tokens, 1 + ways)`."""
            gap = logits.gather(1, largest[:, None]) - logits.gather(1, compared[:, None])
            masked = _without_ends(logits, chosen, ends)
            return torch.cat([gap, *(way.of(logits, masked, chosen) for way in ways)], 1)

        exact, noisy = figures(logits), list[torch.Tensor]()
        del logits, without_ends  # of `(tokens, vocabulary)` in float64, which the passes with noise need room for
        decides = any(name not in CONTINUOUS for name in decisions)
        count = MOST_PASSES if decides else LEAST_PASSES
        for seed in range(count):
            step(f"with noise ({seed + 1} of {count})")
            kernels = half_kernels.replacement(model, len(tokens.prompt) + len(tokens.ids))
            with half_kernels.computing(kernels), with_noise(Products(), seed):
                noisy.append(figures(_logits(activations(model, inputs)[OUTPUT], chosen)))
        gap_spread, *logprob_spreads = (
            Spread.of([figure[:, [column]].to(torch.float32) for figure in noisy], exact[:, [column]].contiguous())
            for column in range(exact.shape[1])
        )
        result = _result(
            tokens,
            exact[:, 0],
            gap_spread.allowed(exact[:, [0]], torch.float32)[:, 0],
            largest,
            tokenizer,
            logprobs=_judge_logprobs(tokens, exact[:, 1:], ways, logprob_spreads),
            past_end=past_end,
            decides=decides,
        )
        # a mistake may have a router choose otherwise, so passes with one decide by themselves
        free = Passes(model=model, inputs=inputs, watch=lambda: None, step=step)
        return cls(tokens=tokens, passes=free, gap_spread=gap_spread, logprob_spread=logprob_spreads[0], result=result)

    @property
    def can_do_without(self) -> bool:
        """Report whether PEFT can disable the adapter."""
        return hasattr(self.passes.model, "disable_adapter")

    def without_adapter(self) -> torch.Tensor:
        """Return the float64 logits without the adapter."""
        return self.passes.of("without the adapter", self.passes.model.disable_adapter)

    def fits(self, logits: torch.Tensor) -> bool:
        """Report whether a model with these exact logits could have written the text, with its log probabilities."""
        chosen = torch.tensor(self.tokens.ids)
        masked = _without_ends(_logits(logits, chosen), chosen, _end_ids(self.passes.model))
        gaps = masked.amax(-1, keepdim=True) - masked.gather(1, chosen[:, None])
        if not bool((gaps <= self.gap_spread.allowed(gaps, torch.float32)).all()):
            return False
        return self.fits_logprobs(logits)

    def fits_logprobs(self, logits: torch.Tensor) -> bool:
        """Report whether a model with these exact logits gives the log probabilities of the text, if it has any."""
        if self.tokens.logprobs is None:
            return True
        chosen = torch.tensor(self.tokens.ids)
        exact = _logits(logits, chosen).log_softmax(-1).gather(1, chosen[:, None])
        errors = _errors_of_logprobs(self.tokens.logprobs, exact)
        return bool((errors <= self.logprob_spread.allowed(exact, torch.float32)).all())

    def would_be_written(self, logits: torch.Tensor) -> bool:
        """Report whether a model with these exact logits could have written it as it was: greedily, or sampled."""
        if self.result.verdict == "sampled":
            return self.fits_logprobs(logits)
        return self.fits(logits)

    def mistakes(self, fits: _Fits) -> list[Cause]:
        """Return mistakes with the adapter as a whole whose exact logits fit this text."""
        off = self.without_adapter() if self.can_do_without else None
        return [cause for cause, _, logits in mistakes(self.passes, off) if fits(self, logits)]

    def merges(self, fits: _Fits) -> list[Cause]:
        """Return merges in narrower dtypes whose exact logits fit this text; none where PEFT refuses one of them."""
        ways = merges(self.passes.model)
        try:
            return [cause for cause in ways if any(fits(self, self.passes.merged(way)) for way in ways[cause])]
        except MergeRefusedError:
            return []


_Fits = Callable[[_JudgedText, torch.Tensor], bool]


def _explained(judged_texts: Sequence[_JudgedText], fits: _Fits) -> list[Cause]:
    """Return the mistakes that fit each of these texts: merges only where no other mistake does."""
    for causes_of in (_JudgedText.mistakes, _JudgedText.merges):
        causes: list[Cause] | None = None
        for judged in judged_texts:
            if causes == []:  # a pass takes long, and no mistake is left that could fit all texts
                break
            causes_of_text = causes_of(judged, fits)
            if causes is not None:
                causes_of_text = [cause for cause in causes if cause in causes_of_text]
            causes = causes_of_text
        if causes:
            return causes
    return []


def _inputs(model: Any, tokens: Tokens) -> Activations:
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


def _logits(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the logits that have chosen each token, in float64, `(tokens, vocabulary)`."""
    logits_of_text = logits[0, -len(chosen) :]
    if int(chosen.max()) >= logits_of_text.shape[-1]:
        raise InputError("the text has a token that the model has no logit for", got=int(chosen.max()))
    return logits_of_text.to(torch.float64)


def _end_ids(model: Any) -> tuple[int, ...]:
    """Return the ids that end a text: of the generation config, else of the model's config."""
    base = base_of(model)
    for config in (getattr(base, "generation_config", None), getattr(base, "config", None)):
        end = getattr(config, "eos_token_id", None)
        if isinstance(end, list):
            return tuple(end)
        if end is not None:
            return (int(end),)
    return ()


def _are_ends(chosen: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    return torch.isin(chosen, torch.tensor(ends, dtype=chosen.dtype))


def _without_ends(logits: torch.Tensor, chosen: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    """Rule out the end of the text where it was not chosen: writers may be told to go on."""
    logits = logits.clone()
    goes_on = ~_are_ends(chosen, ends)
    for end in ends:
        logits[goes_on, end] = -math.inf
    return logits


def _errors_of_logprobs(logprobs: Sequence[float], exact: torch.Tensor) -> torch.Tensor:
    """Return the distance of each log probability from exact ones, `(tokens, ways)`, in the shape of `exact`."""
    return (torch.tensor(logprobs, dtype=torch.float64)[:, None] - exact).abs()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logprobs:
    """How the log probabilities that came with a text compare with those of the model.

    Attributes
    ----------
    ratio : float
        The largest error over what rounding may do; over 1 they are not the model's.
    worst : LogprobGap
        The token with the largest ratio.
    way : str
        How else they were taken from the model's logits; empty if they are the model's, or if no way fits.
    """

    ratio: float
    worst: LogprobGap
    way: str = ""

    @property
    def are_of_model(self) -> bool:
        return self.ratio <= 1  # of NaN, no


def _judge_logprobs(
    tokens: Tokens, exact: torch.Tensor, ways: Sequence[LogprobWay], spreads: Sequence[Spread]
) -> _Logprobs | None:
    """Hold log probabilities against the exact ones of each way, `(tokens, ways)`: the first is the model's own.

    None where none came with the text.
    """
    if tokens.logprobs is None:
        return None
    allowed_by_way = [spread.allowed(exact[:, [way]], torch.float32) for way, spread in enumerate(spreads)]
    allowed = torch.cat(allowed_by_way, 1)
    ratios = _errors_of_logprobs(tokens.logprobs, exact) / allowed
    token = int(ratios[:, 0].argmax())
    worst = LogprobGap(
        token=token + 1, given=tokens.logprobs[token], exact=float(exact[token, 0]), allowed=float(allowed[token, 0])
    )
    judged = _Logprobs(ratio=float(ratios[:, 0].max()), worst=worst)
    if judged.are_of_model:
        return judged
    for way, ratio in zip(ways, ratios.amax(0).tolist(), strict=True):
        if ratio <= 1:
            return replace(judged, way=way.name)
    return judged


def _result(
    tokens: Tokens,
    gaps: torch.Tensor,
    allowed: torch.Tensor,
    largest: torch.Tensor,
    tokenizer: Any,
    *,
    logprobs: _Logprobs | None,
    past_end: int,
    decides: bool,
) -> TextResult:
    """Return the result of a text, from the gap of each token and what rounding may do to it, `(tokens,)`."""
    chosen = torch.tensor(tokens.ids)
    is_largest = chosen == largest
    is_impossible = ~is_largest & ~(gaps <= allowed)  # not `gaps > allowed`: NaN is impossible too
    is_tied = ~is_largest & (gaps <= allowed)
    worst = None
    if is_impossible.any():
        worst = _token_gap(int(is_impossible.nonzero()[0]), chosen, gaps, allowed, largest, tokenizer)
    elif is_tied.any():
        largest_ratio = int((gaps / allowed).where(is_tied, -1.0).argmax())
        worst = _token_gap(largest_ratio, chosen, gaps, allowed, largest, tokenizer)
    verdict = _verdict(logprobs, is_greedy=not is_impossible.any(), decides=decides)
    result = TextResult(
        tokens=len(tokens.ids),
        largest=int(is_largest.sum()),
        tied=int(is_tied.sum()),
        verdict=verdict,
        worst=worst,
        past_end=past_end,
        reason=_UNDECIDED if verdict == "undecided" else "",
    )
    if logprobs is None:
        return result
    return msgspec.structs.replace(
        result,
        logprobs=logprobs.ratio,
        logprobs_of=logprobs.way,
        worst_logprob=None if logprobs.are_of_model else logprobs.worst,
    )


def _token_gap(
    place: int,
    chosen: torch.Tensor,
    gaps: torch.Tensor,
    allowed: torch.Tensor,
    largest: torch.Tensor,
    tokenizer: Any,
) -> TokenGap:
    """Return the token at a place beside the one with the largest logit, in words where there is a tokenizer."""
    token_id, largest_id = int(chosen[place]), int(largest[place])
    text, largest_text = "", ""
    if tokenizer is not None:
        text, largest_text = tokenizer.decode([token_id]), tokenizer.decode([largest_id])
    return TokenGap(
        token=place + 1,
        id=token_id,
        largest_id=largest_id,
        gap=float(gaps[place]),
        allowed=float(allowed[place]),
        text=text,
        largest_text=largest_text,
    )


_UNDECIDED = "a router or another selection may have chosen otherwise by rounding: not judged"


def _verdict(logprobs: _Logprobs | None, *, is_greedy: bool, decides: bool) -> Verdict:
    """Return the verdict on the tokens of a text.

    Parameters
    ----------
    is_greedy : bool
        Each token is the most likely one, but for rounding.
    decides : bool
        The model makes decisions, which rounding may turn.
    """
    # log probabilities in any known way show that this model computed the text
    if logprobs is not None and (logprobs.are_of_model or logprobs.way):
        return "possible" if is_greedy else "sampled"
    if is_greedy and (logprobs is None or not decides):
        return "possible"
    return "undecided" if decides else "impossible"
