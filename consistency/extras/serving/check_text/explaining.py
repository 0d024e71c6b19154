"""Explain wrong texts by mistakes of their writer or by its arithmetic, and say what texts do not tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.alternatives import (
    AskedText,
    Extent,
    LayerSet,
    figures_without_adapter,
    not_tried,
)
from consistency.extras.serving.check_text.arithmetic import EngineArithmetic, engines_with, others_than
from consistency.extras.serving.check_text.common_causes import Causes, causes_of
from consistency.extras.serving.check_text.judged_text import JudgedText, TokenFigures
from consistency.extras.serving.check_text.judging import MOST_EXPLAINED, SAMPLE, Judging, dtype_of
from consistency.extras.serving.check_text.power import can_lean, leaning_to, tokens_to_tell
from consistency.extras.serving.check_text.report import TextReport, TextResult, Told
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.told_weights import told_weights

_MOST_IN_ARITHMETICS = 3
"""Wrong texts that other arithmetics of the writer are tried on."""

_ALIKE = 5.0
"""Difference of two logarithms of likelihoods up to which errors do not tell one arithmetic from the other."""

_LEAST_BY_CHANCE, _MOST_BY_CHANCE = 1 / 3, 3.0
"""Sizes of errors, in standard deviations of a noise, between which they may be that noise."""

_DEVIATIONS = 3.0
"""Standard deviations that a mean by chance does not reach, as a rule: what exceeds them has no such name."""

_MOST_ALIKE = 0.8
"""Mean of errors over their size, from which on nearly the same was added to every log probability: not by rounding."""

_MOST_UNLIKELY = 0.25
"""Fraction of tokens that are not the most likely ones, up to which sampled texts may have been written greedily."""


ReportIn = Callable[[EngineArithmetic], TextReport | None]
"""Judges all texts once more by an arithmetic; None where they lean to a mistake nonetheless."""


def with_causes(judging: Judging, report: TextReport, report_in: ReportIn) -> TextReport:
    """Name the mistakes that explain the wrong texts, or that would have written sampled ones greedily."""
    wrong = [number for number, result in enumerate(report.texts) if _is_to_explain(judging, number, result)]
    if not wrong:
        return _with_weights_of_all(judging, report) or _with_greedy_causes(judging, report)
    causes = causes_of(_asked(judging, wrong))
    if causes is not None:
        return _as_explained(report, causes, wrong, min(len(wrong), MOST_EXPLAINED))
    by_arithmetic = _explained_by_arithmetic(judging, report, wrong, report_in)
    if by_arithmetic is not None:
        return by_arithmetic
    leaning = _leaning(judging, _WithoutAdapter())
    return msgspec.structs.replace(report, leaning=leaning, not_tried=not_tried(judging.run.model))


def _explained_by_arithmetic(
    judging: Judging, report: TextReport, wrong: Sequence[int], report_in: ReportIn
) -> TextReport | None:
    """Return the report where another arithmetic of the writer explains the wrong texts; None where none does.

    One that engines have by default is no fault where no engine is stated: all texts are judged again by it. Any
    other one is named as the cause.
    """
    if judging.is_found or judging.run.options.kv_dtype or any(judging.exact[number].decides for number in wrong):
        return None
    arithmetic = _fitting_arithmetic(judging, wrong)
    if arithmetic is None:
        return None
    if not judging.run.options.engine and engines_with(arithmetic, dtype_of(judging.run.model)):
        return report_in(arithmetic)
    cause, about = TextCause.CACHE, arithmetic.kv_dtype
    if arithmetic.computes_in:
        cause, about = TextCause.COMPUTED_IN, arithmetic.computes_in
    drawn = any(not judging.exact[number].in_arithmetic(arithmetic).is_greedy for number in _tried_on(judging, wrong))
    extent = Extent.LOGPROBS if drawn else Extent.TOKENS
    return _as_explained(report, Causes(about={cause: about}, extent=extent), wrong, len(_tried_on(judging, wrong)))


def _fitting_arithmetic(judging: Judging, wrong: Sequence[int]) -> EngineArithmetic | None:
    """Return the arithmetic that fits wrong texts best, of those that explain all that they are tried on.

    An arithmetic whose rounding is so large that the base alone would be explained too tells nothing. Without log
    probabilities no errors are seen whose size would tell one from another, so only those that engines have by
    default are tried.
    """
    dtype = dtype_of(judging.run.model)
    numbers = _tried_on(judging, wrong)
    likelihoods: dict[EngineArithmetic, float] = {}
    has_logprobs = all(judging.tokens[number].judged_logprobs is not None for number in numbers)
    for arithmetic in others_than(dtype):
        if not has_logprobs and not engines_with(arithmetic, dtype):
            continue
        judged = list(_explained_in(judging, arithmetic, numbers))
        if len(judged) < len(numbers) or (has_logprobs and not _are_by_chance(judged)):
            continue
        if judging.run.has_adapter and all(_is_explained_without(text) for text in judged):
            continue
        if not has_logprobs:
            return arithmetic
        likelihoods[arithmetic] = _log_likelihood(judged)
    if not likelihoods:
        return None
    best = max(likelihoods, key=lambda arithmetic: likelihoods[arithmetic])
    for arithmetic, likelihood in likelihoods.items():
        # what an engine does by default is the likelier explanation where the errors cannot tell
        if engines_with(arithmetic, dtype) and likelihood > likelihoods[best] - _ALIKE:
            return arithmetic
    return best


def _explained_in(judging: Judging, arithmetic: EngineArithmetic, numbers: Sequence[int]) -> Iterator[JudgedText]:
    """Yield texts as judged by an arithmetic, up to the first that it does not explain."""
    for number in numbers:
        judged = judging.exact[number].in_arithmetic(arithmetic)
        if not _is_right(judged):
            return
        yield judged


def _tried_on(judging: Judging, wrong: Sequence[int]) -> list[int]:
    """Return the wrong texts that arithmetics are tried on: some with log probabilities, where any have them."""
    with_logprobs = [number for number in wrong if judging.tokens[number].judged_logprobs is not None]
    by_length = sorted(with_logprobs or wrong, key=lambda number: _length(judging, number))
    return by_length[:_MOST_IN_ARITHMETICS]


def _length(judging: Judging, number: int) -> int:
    return len(judging.tokens[number].ids) + len(judging.tokens[number].prompt)


def _is_to_explain(judging: Judging, number: int, result: TextResult) -> bool:
    return result.is_unexplained and number in judging.exact


def _asked(judging: Judging, numbers: Sequence[int]) -> list[AskedText]:
    # short texts first, as each cause takes a pass over one
    by_length = sorted(numbers, key=lambda number: _length(judging, number))
    run = judging.run
    layer_sets: dict[str, LayerSet] = {}
    return [
        AskedText(
            text=judging.texts[number],
            judged=judging.exact[number],
            tokenizer=run.tokenizer,
            others=run.others,
            layer_sets=layer_sets,
        )
        for number in by_length[:MOST_EXPLAINED]
    ]


def _with_weights_of_all(judging: Judging, report: TextReport) -> TextReport | None:
    """Name the weights in few bits that put log probabilities off as a whole, though none by itself; None for none."""
    if report.summary is None or not report.summary.is_beyond or report.summary.way:
        return None
    weights = told_weights(_asked(judging, _to_be_told_by(judging)))
    if weights is None:
        return None
    cause = Cause.WEIGHTS
    return msgspec.structs.replace(report, logprob_causes=(cause.value,), about={cause.value: weights.about[0]})


def _with_greedy_causes(judging: Judging, report: TextReport) -> TextReport:
    """Name a mistake that makes every token of sampled texts the most likely one: they were written so, not drawn.

    In a half type log probabilities may be within tolerance where a token is not. Asked of a few texts alone, and
    of such as have few tokens that are not the most likely ones.
    """
    sampled = [
        number
        for number, result in enumerate(report.texts)
        if result.verdict == "sampled" and number in judging.exact and judging.sampling(number) is None
    ]
    unlikely = sum(report.texts[number].unlikely for number in sampled)
    tokens = sum(report.texts[number].tokens for number in sampled)
    if not sampled or len(judging.texts) > SAMPLE or unlikely > _MOST_UNLIKELY * tokens:
        return report
    causes = causes_of(_asked(judging, sampled[:2]), greedily=True)
    if causes is None:
        return report
    return _as_explained(report, causes, sampled, min(len(sampled), 2))


class _WithoutAdapter:
    """The exact figures of texts by the base alone, each computed once and as it is asked for."""

    def __init__(self) -> None:
        self._by_text: dict[int, tuple[JudgedText, TokenFigures]] = {}

    def of(self, text: JudgedText) -> TokenFigures:
        """Return the exact figures of a text by the base alone."""
        if id(text) not in self._by_text:
            # the text is kept with its figures, so that no other one can have its id
            self._by_text[id(text)] = (text, figures_without_adapter(text))
        return self._by_text[id(text)][1]


def with_what_is_not_told(judging: Judging, report: TextReport) -> TextReport:
    """Say whether the base alone could have written all texts, and what they lean to."""
    if report.verdict != "consistent":
        return report
    without = _WithoutAdapter()
    report = msgspec.structs.replace(report, leaning=_leaning(judging, without) or _leaning_to_weights(judging))
    if not judging.run.has_adapter:
        return report
    texts = [judging.exact[number] for number in judging.sample if not judging.is_of_another(number)]
    # the first text that the base alone could not have written says that it did not write all
    if not texts or not all(_could_write(text, without.of(text)) for text in texts):
        return report
    told = Told(phrase="whether the adapter is on", tokens=tokens_to_tell(texts, [without.of(text) for text in texts]))
    return msgspec.structs.replace(report, base_alone=True, told=(told,))


def _leaning(judging: Judging, without: _WithoutAdapter) -> str:
    """Return what the log probabilities lean to as a whole, of scalings of the adapter; empty where to nothing."""
    if not judging.run.has_adapter:
        return ""
    texts, given, differences = list[JudgedText](), list[torch.Tensor](), list[torch.Tensor]()
    for number in judging.distinct(list(judging.exact)):
        text = judging.exact[number]
        wanted = text.tokens.judged_logprobs
        if wanted is None or text.decides or judging.is_of_another(number):
            continue
        texts.append(text)
        given.append(wanted.isfinite())
        differences.append((wanted - text.exact.logprobs)[wanted.isfinite()])
    directions = list[torch.Tensor]()
    for text, is_given in zip(texts, given, strict=True):
        # each takes a pass in float64, and differences of float32 are too small to lean, whatever the others' say
        if directions and not can_lean(differences, directions):
            return ""
        directions.append((without.of(text).logprobs - text.exact.logprobs)[is_given])
    return leaning_to(differences, directions)


def _leaning_to_weights(judging: Judging) -> str:
    """Return the weights in few bits that log probabilities lean to, though none is beyond rounding; empty for none."""
    weights = told_weights(_asked(judging, _to_be_told_by(judging)))
    return "" if weights is None else f"the log probabilities lean to weights in {weights.about[0]}"


def _to_be_told_by(judging: Judging) -> list[int]:
    """Return the texts of the sample that tell weights: with log probabilities, and by the adapter that is judged."""
    return [
        number
        for number in judging.distinct(judging.sample)
        if not judging.is_of_another(number)
        and not judging.exact[number].decides
        and judging.exact[number].tokens.judged_logprobs is not None
    ]


def _as_explained(report: TextReport, causes: Causes, numbers: Sequence[int], tried: int) -> TextReport:
    """Return a report with the causes of wrong texts: they explain their tokens, or the log probabilities alone."""
    values = tuple(str(cause.value) for cause in causes.about)
    about = {str(cause.value): name for cause, name in causes.about.items() if name}
    are_written_so = causes.extent is Extent.TOKENS
    results = list(report.texts)
    for number in numbers:
        result = results[number]
        if result.verdict in ("undecided", "sampled") and are_written_so:
            results[number] = msgspec.structs.replace(result, verdict="impossible", reason="")
        elif result.verdict == "undecided":
            results[number] = msgspec.structs.replace(result, verdict="sampled", reason="")
    return msgspec.structs.replace(
        report,
        texts=tuple(results),
        causes=values if are_written_so else (),
        logprob_causes=() if are_written_so else values,
        about=about,
        explained=tried,
    )


def _are_by_chance(texts: Sequence[JudgedText]) -> bool:
    """Report whether errors of log probabilities have the size of the passes' noise, and both signs alike."""
    errors = torch.cat([error / deviation for error, deviation in map(_errors_and_deviations, texts)])
    size = float(errors.square().mean().sqrt())
    sum_in_deviations = abs(float(errors.sum())) / math.sqrt(len(errors))
    has_its_size = _LEAST_BY_CHANCE <= size <= _MOST_BY_CHANCE
    # errors of one cache lean to one side, as tokens share it, but are never the same at every token
    is_constant = abs(float(errors.mean())) > _MOST_ALIKE * size
    return has_its_size and not is_constant and sum_in_deviations <= _DEVIATIONS * max(size, 1.0)


def _log_likelihood(texts: Sequence[JudgedText]) -> float:
    """Return the logarithm of the density of the errors, if they are normal with the deviations of the noise."""
    likelihood = 0.0
    for error, deviation in map(_errors_and_deviations, texts):
        likelihood -= float((deviation.log() + (error / deviation).square() / 2).sum())
    return likelihood


def _errors_and_deviations(text: JudgedText) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the error of each log probability that is given, and the standard deviation of the noise there."""
    wanted = text.tokens.judged_logprobs
    assert wanted is not None
    deviations = (text.noisy_logprobs - text.exact.logprobs).square().mean(0).sqrt()
    # of three passes one deviation may be small by chance: no token is taken for surer than the median
    deviations = deviations.maximum(deviations.median()).clamp_min(1e-12)
    is_given = wanted.isfinite()
    return (wanted - text.exact.logprobs)[is_given], deviations[is_given]


def _is_right(text: JudgedText) -> bool:
    """Report whether a text is right as it is: its log probabilities where it has any, else its tokens."""
    ratios = text.logprob_ratios
    return text.is_greedy if ratios is None else bool((ratios <= 1).all())


def _is_explained_without(text: JudgedText) -> bool:
    """Report whether the base alone explains a text too, by the same rounding."""
    figures = figures_without_adapter(text)
    if text.tokens.judged_logprobs is not None:
        return bool(text.fit_logprobs(figures).all())
    return bool(text.fit_greedily(figures).all())


def _could_write(text: JudgedText, figures: TokenFigures) -> bool:
    """Report whether a model with these figures could have written a text as it is: greedily, or sampled."""
    if not bool(text.fit_logprobs(figures).all()):
        return False
    return not text.is_greedy or bool(text.fit_greedily(figures).all())
