"""Name how log probabilities were taken, of single texts and of all, and say how they are as a whole."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec
import torch

from consistency.extras.serving.check_text.arithmetic import log_softmax_error
from consistency.extras.serving.check_text.computed_in_parts import active
from consistency.extras.serving.check_text.differences import summarize
from consistency.extras.serving.check_text.fitted_samplers import processings_of, score_of
from consistency.extras.serving.check_text.judged_text import chosen_ids, penalized_by
from consistency.extras.serving.check_text.judging import FAR_OUTSIDE, MOST_EXPLAINED, Judging
from consistency.extras.serving.check_text.options import sampling_of_logprobs
from consistency.extras.serving.check_text.penalties import USUAL_PENALTIES
from consistency.extras.serving.check_text.processing import TRANSCRIBED, Logits, Processing, surprise_of
from consistency.extras.serving.check_text.ranking import Ranking
from consistency.extras.serving.check_text.report import TextReport, Verdict
from consistency.extras.serving.check_text.sampling import USUAL_SAMPLERS, USUAL_TEMPERATURES, Sampling
from consistency.extras.serving.check_text.screening import PlainText, plain_logits, plain_text
from consistency.extras.serving.check_text.summary import LogprobSummary

_MOST_FITTED_TEXTS = 4
"""Wrong texts that a sampler's parameters are fitted to together."""

_MOST_FITTED_TOKENS = 128
"""Tokens of all these texts that they are fitted to, spread over each; they are then held against all."""

_FEW_TOKENS = 16
"""Tokens of each text by which penalties are compared."""

_MOST_PENALTIES = 4
"""Penalties that are held against all tokens, the nearest first."""

_LEAST_DRAWS = 100
"""Tokens from which on the mean of their likelihood is nearly that of a normal distribution."""


def processing_of_sample(judging: Judging) -> Processing | None:
    """Return how the log probabilities of all texts of the sample were taken, where one way explains them.

    It is looked for before the other texts are computed, so that their pass is the only one.
    """
    sample = judging.sample
    if judging.run.others:
        return None  # which adapter wrote a text is told first: by the wrong one its log probabilities are others too
    are_others = [judging.exact_result(number).has_other_logprobs for number in sample]
    if len(sample) < 2 or not all(are_others) or any(judging.exact[number].decides for number in sample):
        return None
    for processing in _processings(judging, sample):
        if _ratios_of_processing(judging, processing, sample[:MOST_EXPLAINED]) is not None:
            # penalties change which tokens are likely, and not the log probabilities alone
            return None if processing.sampling.penalizes else processing
    judging.sought_in_vain = tuple(sample)
    return None


def with_processing(judging: Judging, report: TextReport) -> TextReport:
    """Name how log probabilities were taken that are not the model's, where one way explains all of them."""
    numbers = [number for number, result in enumerate(report.texts) if result.has_other_logprobs]
    exact = [number for number in numbers if number in judging.exact and not judging.exact[number].decides]
    if not exact or tuple(exact) == judging.sought_in_vain:
        return report
    found = [] if judging.processing is None else [judging.processing]
    for processing in itertools.chain(found, _processings(judging, exact)):
        ratios = _ratios_of_processing(judging, processing, exact[:MOST_EXPLAINED])
        if ratios is not None:
            return _as_processed(judging, report, processing, numbers, ratios)
    return report


def _processings(judging: Judging, numbers: Sequence[int]) -> Iterator[Processing]:
    """Yield ways in which log probabilities of wrong texts may have been taken, the one that is stated first."""
    options = judging.run.options
    stated = {judging.sampling(number) for number in numbers}
    sampling = stated.pop() if len(stated) == 1 else None
    for after in dict.fromkeys([sampling_of_logprobs(options, sampling), sampling]):
        if after is not None and str(after):
            yield Processing(sampling=after)
            yield Processing(sampling=after, is_end_masked=True)
            if after.repetition_penalty != 1.0:
                yield Processing(sampling=msgspec.structs.replace(after, penalized_padding=True))
    given = torch.cat([_given(judging, number) for number in numbers])
    yield from (processing for processing in TRANSCRIBED if processing.transcription.may_be(given))
    yield from _fitted_processings(judging, numbers[:_MOST_FITTED_TEXTS])
    yield from _with_penalties(judging, numbers[:_MOST_FITTED_TEXTS])


def _given(judging: Judging, number: int) -> torch.Tensor:
    """Return the log probabilities that came with a text, `(tokens,)`."""
    logprobs = judging.exact[number].tokens.judged_logprobs
    assert logprobs is not None
    return logprobs


def _fitted_processings(judging: Judging, numbers: Sequence[int]) -> list[Processing]:
    """Return ways whose parameters are fitted to the tokens of some texts together."""
    of_texts: list[Logits] = []
    rows: list[tuple[torch.Tensor, ...]] = []
    for number in numbers:
        text, logprobs = judging.exact[number], _given(judging, number)
        given = logprobs.isfinite().nonzero()[:, 0]
        places = given[:: max(1, math.ceil(len(given) * len(numbers) / _MOST_FITTED_TOKENS))]
        of_texts.append(text.logits().at(places))
        rows.append(tuple(value[places] for value in (text.chosen, logprobs, text.allowed_logprobs)))
    chosen, wanted, allowed = (torch.cat(values) for values in zip(*rows, strict=True))
    return processings_of(wanted, Logits.joined(of_texts), chosen, allowed)


def _with_penalties(judging: Judging, numbers: Sequence[int]) -> list[Processing]:
    """Return usual penalties, each with its nearest usual temperature, that come nearest to log probabilities."""
    texts = [judging.exact[number] for number in numbers]
    if any(text.tokens.penalties.penalizes for text in texts):
        return []
    squares: dict[Processing, float] = {}
    for text in texts:
        wanted = text.tokens.judged_logprobs
        assert wanted is not None
        few = _few_of(wanted)
        for penalties, logits in text.logits_by_penalties(USUAL_PENALTIES):
            for temperature in USUAL_TEMPERATURES:
                processing = Processing(sampling=msgspec.structs.replace(penalties, temperature=temperature))
                errors = processing.logprobs(logits.at(few), text.chosen[few])[:, 0] - wanted[few]
                squares[processing] = squares.get(processing, 0.0) + float(errors.square().sum())
    return sorted(squares, key=lambda processing: squares[processing])[:_MOST_PENALTIES]


def _few_of(wanted: torch.Tensor) -> torch.Tensor:
    """Return the places of the least likely tokens of a text, of those that have a log probability."""
    given = wanted.isfinite().nonzero()[:, 0]
    return given[wanted[given].argsort()[:_FEW_TOKENS]]


def _ratios_of_processing(judging: Judging, processing: Processing, numbers: Sequence[int]) -> dict[int, float] | None:
    """Return the largest ratio of each text where a way explains all of them, else None."""
    ratios = {}
    for number in numbers:
        step = functools.partial(judging.step, number)
        text = judging.exact[number]
        ratios[number] = min(text.ratio_of_processing(way, step) for way in _ways_of_batch(processing))
        if not ratios[number] <= 1:
            return None
    return ratios


def _ways_of_batch(processing: Processing) -> list[Processing]:
    """Return the ways in which the texts of a batch were taken: the longest prompt has no padding."""
    if not processing.sampling.penalized_padding:
        return [processing]
    without = msgspec.structs.replace(processing.sampling, penalized_padding=False)
    return [processing, dataclasses.replace(processing, sampling=without)]


def _as_processed(
    judging: Judging, report: TextReport, processing: Processing, numbers: Sequence[int], ratios: dict[int, float]
) -> TextReport:
    """Return the report with the way in which log probabilities were taken, of each text that it explains."""
    results = list(report.texts)
    for number in numbers:
        result = results[number]
        if number not in ratios:
            found = [judging.screen.ratio(_plain_by(judging, number, way)) for way in _ways_of_batch(processing)]
            ratios[number] = min(found) / FAR_OUTSIDE
        if not ratios[number] <= 1:
            continue
        verdict: Verdict = "sampled" if result.verdict == "undecided" else result.verdict
        result = msgspec.structs.replace(result, logprobs_of=processing.name, verdict=verdict, reason="")
        is_stated = sampling_of_logprobs(judging.run.options, judging.sampling(number)) == processing.sampling
        if is_stated and not processing.is_end_masked:
            result = msgspec.structs.replace(result, logprobs=ratios[number], worst_logprob=None)
            judging.plain.pop(number, None)  # its differences from the model's own are none of rounding
        results[number] = result
    return msgspec.structs.replace(report, texts=tuple(results))


def _plain_by(judging: Judging, number: int, processing: Processing) -> PlainText:
    """Return a text in one pass in the dtype, with its log probabilities taken in a way."""
    known = judging.plain[number].taken_by(processing) if number in judging.plain else None
    if known is not None:
        return known
    tokens = penalized_by(processing.sampling, judging.tokens[number])
    by_processing = plain_text(judging.run.model, tokens, also_by=processing).taken_by(processing)
    assert by_processing is not None
    return by_processing


def with_summary(judging: Judging, report: TextReport) -> TextReport:
    """Add the figures of all log probabilities, where some came with the texts."""
    distinct = judging.distinct(sorted(judging.plain))
    differences = [judging.plain[number].differences for number in distinct]
    with_logprobs = [of_text for of_text in differences if of_text is not None]
    sample = [judging.exact[number] for number in judging.sample]
    digits = max(tokens.logprob_rounding for tokens in judging.tokens)
    rounding = digits + log_softmax_error(sample[0].exact.vocabulary)
    of_trainer = [judging.plain[number].trainer_differences for number in distinct]
    report = msgspec.structs.replace(
        report,
        summary=summarize(with_logprobs, sample, rounding),
        trainer=summarize([of_text for of_text in of_trainer if of_text is not None], sample, rounding),
    )
    if report.summary is None or not report.summary.is_beyond:
        return report
    if any(result.has_other_logprobs for result in report.texts):
        return report
    summary = msgspec.structs.replace(report.summary, way=_way_of_all(judging, report.summary))
    return msgspec.structs.replace(report, summary=summary)


def _way_of_all(judging: Judging, summary: LogprobSummary) -> str:
    """Return how log probabilities were taken that are off as a whole, and by no token alone; empty for no way.

    The way is the one that leaves the smallest errors, and has to leave no more than healthy passes have.
    """
    numbers = [number for number in judging.sample if judging.exact[number].tokens.judged_logprobs is not None]
    if not numbers or any(judging.exact[number].decides for number in numbers):
        return ""
    residuals: dict[Processing, list[torch.Tensor]] = {}
    for number in numbers:
        for processing, of_text in _residuals(judging, number).items():
            residuals.setdefault(processing, []).append(of_text)
    scores = {processing: score_of(processing, torch.cat(of_way)) for processing, of_way in residuals.items()}
    nearest = min(scores, key=lambda processing: scores[processing])
    of_way = summarize(residuals[nearest], [judging.exact[number] for number in numbers])
    if of_way is None or of_way.is_beyond:
        return ""
    # so much nearer than the model's own that chance is no reason
    return nearest.name if abs(of_way.found.mean) < abs(summary.found.mean) / 3 else ""


def _residuals(judging: Judging, number: int) -> dict[Processing, torch.Tensor]:
    """Return the differences of a text's log probabilities from those of each usual sampler."""
    text = judging.exact[number]
    wanted, logits = text.tokens.judged_logprobs, text.logits()
    assert wanted is not None
    residuals = {}
    for is_end_masked in (False, True) if logits.masks_end else (False,):
        ranking = Ranking.of(logits.of(is_end_masked=is_end_masked), text.chosen, 1.0)
        for sampling in (*USUAL_SAMPLERS, *((Sampling(),) if is_end_masked else ())):
            processing = Processing(sampling=sampling, is_end_masked=is_end_masked)
            residuals[processing] = wanted - ranking.logprobs(sampling)
    return residuals


def with_surprise(judging: Judging, report: TextReport) -> TextReport:
    """Add by how much the tokens of texts that came as sampled are less likely than draws are."""
    excess = variance = 0.0
    tokens = 0
    for number, tokens_of_text in enumerate(judging.tokens):
        sampling = judging.sampling(number)
        if sampling is None or report.texts[number].verdict == "undecided":
            continue
        change = active(judging.run.model, judging.writers[number]) if judging.is_of_another(number) else None
        judging.step(number, "as draws")
        logits = plain_logits(judging.run.model, tokens_of_text, change)
        surprises, variances = surprise_of(Processing(sampling=sampling), logits, chosen_ids(tokens_of_text))
        excess += float(surprises.sum())
        variance += float(variances.sum())
        tokens += len(surprises)
    if tokens < _LEAST_DRAWS or variance <= 0:
        return report
    return msgspec.structs.replace(report, surprise=excess / math.sqrt(variance))
