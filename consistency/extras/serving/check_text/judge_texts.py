"""Check whether a model could have written texts, and whether their log probabilities are the model's.

A writer that always takes the most likely token takes another one only where rounding has put it above. So the gap of
each token to the largest logit is computed in float64, and what rounding may do to that gap by passes with random
rounding errors in the dtype that the writer is said to have used. Of a sampled text, whose tokens are not the most
likely ones, log probabilities tell that the model computed it. They are judged by themselves, token by token in the
same way, and as a whole beside two healthy passes: whether the tokens are possible and whether the log probabilities
are the model's are two statements.

A text that is wrong is held against what could have written it: log probabilities that a sampler has processed, another
adapter, the mistakes that an engine makes with one, other prompts, other positions. Each is named where it explains
every wrong text that it is tried on.

Of many texts a sample is judged in float64, and the others by one pass in the dtype; where that is not near enough, in
float64 too (`screening.py`).
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from consistency.case.case import Case
from consistency.case.recognition import has_tokenizer
from consistency.errors import InputError, did_you_mean, first_line
from consistency.extras.serving.check_text.alternatives import (
    AskedText,
    Causes,
    Extent,
    active,
    can_disable,
    causes_of,
    figures_without_adapter,
)
from consistency.extras.serving.check_text.arithmetic import (
    OWN,
    EngineArithmetic,
    engines_with,
    log_softmax_error,
    of_engine,
    others_than,
)
from consistency.extras.serving.check_text.differences import summarize
from consistency.extras.serving.check_text.judged_text import JudgedText, Step, TokenFigures, chosen_ids
from consistency.extras.serving.check_text.power import leaning_to, tokens_to_tell, written_by
from consistency.extras.serving.check_text.processing import (
    USUAL_SAMPLERS,
    Logits,
    Processing,
    Ranking,
    processings_of,
    score_of,
    surprise_of,
)
from consistency.extras.serving.check_text.report import TextReport, TextResult, Told, Verdict
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.screening import PlainText, Screen, plain_logits, plain_text
from consistency.extras.serving.check_text.summary import LogprobSummary
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text, Tokens, encoded
from consistency.extras.serving.engines import ENGINES
from consistency.numerics.dtype import name_of
from consistency.worker.model.inputs import tokenizer_of
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import model_code
from consistency.worker.recorder import Skip

_SAMPLE = 8
"""Texts that are judged in float64, whatever the screen says of them."""

_MOST_SUSPICIOUS = 16
"""Texts more that are judged in float64, those that are furthest from a pass in the dtype."""

_MOST_EXPLAINED = 6
"""Wrong texts that causes are tried on."""

_MOST_IN_ARITHMETICS = 3
"""Wrong texts that other arithmetics of the writer are tried on."""

_ALIKE = 5.0
"""Difference of two logarithms of likelihoods up to which errors do not tell one arithmetic from the other."""

_MOST_FITTED_TEXTS = 4
"""Wrong texts that a sampler's parameters are fitted to together."""

_LEAST_BY_CHANCE, _MOST_BY_CHANCE = 1 / 3, 3.0
"""Sizes of errors, in standard deviations of a noise, between which they may be that noise."""

_DEVIATIONS = 3.0
"""Standard deviations that a mean by chance does not reach, as a rule: what exceeds them has no such name."""

_MOST_ALIKE = 0.8
"""Mean of errors over their size, from which on nearly the same was added to every log probability: not by rounding."""

_FAR_OUTSIDE = 4.0
"""Ratio of the screen from which on a text is wrong that could not be judged in float64 for the number of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How texts were written, as the user states it.

    Attributes
    ----------
    sampling : Sampling or None
        How tokens were drawn, of all texts that do not say it themselves; None where nothing is said.
    processed : bool or None
        Log probabilities were taken after the sampler's processing, as `sampling` says; None: as the engine takes them
        by default, and the model's own where no engine is stated.
    kv_dtype : str
        Dtype in which the engine keeps keys and values, such as `float16`; empty for the engine's default, and the
        model's own where no engine is stated.
    engine : str
        Engine that wrote them, such as `llama.cpp`: its arithmetic by default is what rounding is taken from.
    """

    sampling: Sampling | None = None
    processed: bool | None = None
    kv_dtype: str = ""
    engine: str = ""

    def __post_init__(self) -> None:
        """Refuse an engine that is not known."""
        if self.engine and self.engine not in ENGINES:
            raise InputError(
                "this engine's arithmetic is not known",
                got=self.engine,
                wanted=", ".join(ENGINES),
                hint=did_you_mean(self.engine, tuple(ENGINES)),
            )


def _stated_arithmetic(options: TextOptions, dtype: str) -> EngineArithmetic:
    """Return how the writer computes with a model in a dtype, as far as it is stated."""
    arithmetic = of_engine(options.engine, dtype)
    return replace(arithmetic, kv_dtype=options.kv_dtype) if options.kv_dtype else arithmetic


def _sampling_of_logprobs(options: TextOptions, sampling: Sampling | None) -> Sampling | None:
    """Return the part of a sampler that log probabilities were taken after; None where they are the model's own."""
    if sampling is None or options.processed:
        return sampling
    if options.processed is False or not options.engine:
        return None
    settings = ENGINES[options.engine].processed_by
    return Sampling(**{name: getattr(sampling, name) for name in settings}) if settings else None


def check_text(
    case: Case, texts: Sequence[Text], *, options: TextOptions = TextOptions(), step: Step | None = None
) -> TextReport:
    """Check whether the model of a case could have written texts, and whether their log probabilities are its own.

    Several adapters of the case are each tried, and the one that wrote a text is named.

    Parameters
    ----------
    texts : sequence of Text
        Each written greedily; or sampled, with log probabilities or with `options.sampling`.
    options : TextOptions
        How they were written.
    step : callable
        Called with the name of the next step.

    Raises
    ------
    InputError
        A text cannot be used, or the model does not run.
    """
    announce = step or _nothing
    with _quietly():
        announce("load")
        model = load_model(case, "cpu")
        tokenizer = None
        if case.factory is None and has_tokenizer(Path(case.base)):
            tokenizer = tokenizer_of(case.base)
        others = _load_others(model, case)
        first = case.adapters[0].name if case.adapters else ""
        run = _Run(model=model, tokenizer=tokenizer, options=options, step=announce, first=first, others=others)
        return _checked(run, texts, case.base)


def check_rollouts(
    model_or_case: Any,
    texts: Sequence[Text],
    *,
    tokenizer: Any = None,
    options: TextOptions = TextOptions(),
    step: Step | None = None,
) -> TextReport:
    """Check the log probabilities of rollouts against a model that is loaded, as a trainer has it, or against a case.

    The model is left as it is: a copy on the CPU is judged, in the dtype that its parameters have. A call takes memory
    for the copy, and about three passes over the texts on the CPU's cores.

    Parameters
    ----------
    model_or_case : torch.nn.Module or Case
        A model of transformers, or PEFT's with its active adapter; or a case, as `check_text` takes it.
    texts : sequence of Text
        Prompt and text as token ids, or in words with a tokenizer; log probabilities as the engine gave them.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        For texts in words, and to show tokens in words.

    Raises
    ------
    InputError
        A text cannot be used, the model does not run, or its parameters are split over several processes.
    """
    if isinstance(model_or_case, Case):
        return check_text(model_or_case, texts, options=options, step=step)
    with _quietly():
        model = _copy_on_cpu(model_or_case)
        run = _Run(model=model, tokenizer=tokenizer, options=options, step=step or _nothing)
        return _checked(run, texts, type(model_or_case).__name__)


def _nothing(_: str) -> None:
    return None


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence what libraries say about themselves."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _load_others(model: Any, case: Case) -> list[str]:
    """Load the other adapters of a case into its model, and return their names."""
    names = []
    for adapter in case.adapters[1:]:
        try:
            model.load_adapter(adapter.path, adapter_name=adapter.name)
        except Exception as error:  # PEFT's, and of the files
            reason = first_line(error)
            raise InputError(
                "PEFT cannot load this adapter beside the first", where=adapter.path, got=reason
            ) from error
        names.append(adapter.name)
    model.eval()
    return names


def _copy_on_cpu(model: Any) -> Any:
    """Return a copy of a model on the CPU, in evaluation mode; the model itself is left where and as it is."""
    inner = getattr(model, "module", model)  # of DistributedDataParallel
    copies: dict[int, Any] = {}
    for tensor in (*inner.parameters(), *inner.buffers()):
        if type(tensor).__name__ == "DTensor" or hasattr(tensor, "placements"):
            raise InputError(
                "the model's parameters are split over several processes", got="a DTensor", wanted="whole tensors"
            )
        copied = tensor.detach().to("cpu", copy=True)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        copies[id(tensor)] = torch.nn.Parameter(copied, requires_grad=False) if is_parameter else copied
    return copy.deepcopy(inner, copies).eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A model, and how texts of it are judged."""

    model: Any
    tokenizer: Any
    options: TextOptions
    step: Step
    first: str = ""
    others: Sequence[str] = ()

    @property
    def has_adapter(self) -> bool:
        """Report whether PEFT can disable the adapter."""
        return can_disable(self.model)


def _checked(run: _Run, texts: Sequence[Text], where: str) -> TextReport:
    tokens_of_texts = [
        encoded(text, run.tokenizer, text.name or f"text {number}") for number, text in enumerate(texts, 1)
    ]
    try:
        with model_code(run.model):
            arithmetic = _stated_arithmetic(run.options, _dtype_of(run.model))
            judging = _Judging(run=run, texts=texts, tokens=tokens_of_texts, arithmetic=arithmetic)
            judging.judge()
            return judging.report()
    except Skip as why:
        raise InputError("the model does not run on these texts", where=where, got=str(why)) from why


@dataclass(slots=True, kw_only=True)
class _Judging:
    """All texts, with what is known of each by its number.

    Attributes
    ----------
    sample : list of int
        Texts that are judged in float64 whatever they are.
    exact : dict
        Texts that are judged in float64.
    plain : dict
        Texts that were computed in the dtype, by the adapter that wrote them where that is told.
    writers : dict
        Names of the adapters that wrote texts, where several were given and one is told.
    arithmetic : EngineArithmetic
        How the writer computes, as it is stated or was found.
    is_found : bool
        That it computes so was found here, and is not looked for again.
    """

    run: _Run
    texts: Sequence[Text]
    tokens: list[Tokens]
    sample: list[int] = field(default_factory=list)
    exact: dict[int, JudgedText] = field(default_factory=dict)
    plain: dict[int, PlainText] = field(default_factory=dict)
    writers: dict[int, str] = field(default_factory=dict)
    arithmetic: EngineArithmetic = OWN
    is_found: bool = False
    screen: Screen = field(init=False)

    def judge(self) -> None:
        """Judge a sample of the texts in float64, screen the others, and judge those in float64 that stand out."""
        count = len(self.texts)
        evenly = {round(number * (count - 1) / max(1, _SAMPLE - 1)) for number in range(_SAMPLE)}
        self.sample = sorted(number for number in evenly if number < count)
        for number in self.sample:
            self._judge_exactly(number)
        self.screen = Screen.of([self.exact[number] for number in self.sample])
        has_logprobs = any(
            tokens.judged_logprobs is not None or tokens.judged_trainer_logprobs is not None for tokens in self.tokens
        )
        rest = [number for number in range(count) if number not in self.exact]
        # the figures of all log probabilities are of passes in the dtype
        for number in range(count) if has_logprobs or self.run.others else rest:
            if number in self.plain:
                continue
            self.step(number, "in the dtype")
            self.plain[number] = plain_text(self.run.model, self.tokens[number])
        self._find_writers()
        ratios = {number: self.screen.ratio(self.plain[number]) for number in rest}
        suspicious = [number for number in rest if not ratios[number] <= 1 and not self._is_of_another(number)]
        suspicious.sort(key=lambda number: -ratios[number])
        for number in suspicious[:_MOST_SUSPICIOUS]:
            self._judge_exactly(number)

    def step(self, number: int, name: str) -> None:
        """Announce the next step of a text."""
        self.run.step(f"text {number + 1} of {len(self.texts)}: {name}")

    def sampling(self, number: int) -> Sampling | None:
        """Return how the tokens of a text were drawn, as it says itself, or the user."""
        sampling = self.texts[number].sampling or self.run.options.sampling
        is_greedy = sampling is not None and sampling.temperature == 0
        return None if is_greedy else sampling

    def _judge_exactly(self, number: int) -> None:
        step = functools.partial(self.step, number)
        judged = JudgedText.of(self.run.model, self.tokens[number], self.run.tokenizer, step, self.arithmetic)
        self.exact[number] = judged
        self.tokens[number] = judged.tokens

    def _find_writers(self) -> None:
        """Tell which adapter wrote each text, where several were given; its pass stands for the text from then on."""
        if not self.run.others:
            return
        for number, tokens in enumerate(self.tokens):
            self.step(number, "by each adapter")
            plain_texts = {self.run.first: self.plain[number]}
            for name in self.run.others:
                plain_texts[name] = plain_text(self.run.model, tokens, active(self.run.model, name))
            is_sampled = self.sampling(number) is not None
            writer = written_by(plain_texts, self.screen, is_sampled=is_sampled, far=_FAR_OUTSIDE)
            if writer:
                self.writers[number] = writer
                self.plain[number] = plain_texts[writer]

    def _is_of_another(self, number: int) -> bool:
        """Report whether another adapter than the first wrote a text."""
        return self.writers.get(number, self.run.first) != self.run.first

    def report(self) -> TextReport:
        """Return the results of all texts, what explains those that are wrong, and what they do not tell."""
        results = tuple(self._result(number) for number in range(len(self.texts)))
        report = TextReport(dtype=_dtype_of(self.run.model), texts=results)
        report = self._with_processing(report)
        report = self._with_summary(report)
        report = self._with_surprise(report)
        report = self._with_causes(report)
        return self._with_what_is_not_told(report)

    # ---- each text by itself

    def _result(self, number: int) -> TextResult:
        is_judged_exactly = number in self.exact and not self._is_of_another(number)
        result = self._exact_result(number) if is_judged_exactly else self._screened_result(number)
        text = self.texts[number]
        return msgspec.structs.replace(
            result,
            name=text.name,
            step=text.step,
            doubt=text.doubt,
            adapter=self.writers.get(number, ""),
            trainer_logprobs=self._trainer_ratio(number, is_judged_exactly=is_judged_exactly),
        )

    def _trainer_ratio(self, number: int, *, is_judged_exactly: bool) -> float | None:
        """Return the largest error of the trainer's log probabilities over what rounding may do; None without any."""
        if is_judged_exactly:
            return self.exact[number].trainer_ratio
        return self.screen.trainer_ratio(self.plain[number])

    def _exact_result(self, number: int) -> TextResult:
        text, sampling = self.exact[number], self.sampling(number)
        exact, allowed = text.exact, text.allowed_gaps
        is_largest = text.chosen == exact.largest
        is_tied = ~is_largest & (exact.gaps <= allowed)
        worst_place = text.first_impossible
        if worst_place is None and bool(is_tied.any()):
            worst_place = int(torch.where(is_tied, exact.gaps / allowed, -math.inf).argmax())
        ratios = text.logprob_ratios
        logprobs = None if ratios is None else float(ratios.max())
        are_wrong = logprobs is not None and not logprobs <= 1
        outside = _outside_of_sampling(sampling, text)
        verdict = _verdict(
            text,
            has_logprobs=logprobs is not None,
            are_wrong=are_wrong,
            is_stated=sampling is not None,
            is_outside=bool(outside),
        )
        reason = outside if verdict == "impossible" else ""
        if verdict == "undecided":
            reason = _UNDECIDED
        elif verdict == "impossible" and self.texts[number].doubt:
            verdict, reason = "undecided", self.texts[number].doubt
        return TextResult(
            tokens=len(text.chosen),
            largest=int(is_largest.sum()),
            tied=int(is_tied.sum()),
            verdict=verdict,
            worst=None if worst_place is None else text.token_gap(worst_place, self.run.tokenizer),
            logprobs=logprobs,
            worst_logprob=text.worst_logprob() if are_wrong else None,
            past_end=exact.past_end,
            reason=reason,
        )

    def _screened_result(self, number: int) -> TextResult:
        """Return the result of a text by its pass in the dtype."""
        plain = self.plain[number]
        is_largest = chosen_ids(plain.tokens) == plain.figures.largest
        is_tied = ~is_largest & (self.screen.gap_ratios(plain) <= 1)
        is_greedy = bool((is_largest | is_tied).all())
        ratios, ratio = self.screen.logprob_ratios(plain), self.screen.ratio(plain)
        verdict: Verdict = "possible" if is_greedy else "sampled"
        reason = ""
        # the adapter that wrote it was chosen by the wider limit
        limit = _FAR_OUTSIDE if number in self.writers else 1.0
        if not ratio <= _FAR_OUTSIDE:
            is_stated = self.sampling(number) is not None
            verdict = "impossible" if ratios is None and not is_stated else verdict
            if verdict == "impossible" and self.texts[number].doubt:
                verdict, reason = "undecided", self.texts[number].doubt
        elif not ratio <= limit and not (ratios is None and self.sampling(number) is not None):
            verdict, reason = "undecided", _TOO_MANY
        return TextResult(
            tokens=len(is_largest),
            largest=int(is_largest.sum()),
            tied=int(is_tied.sum()),
            verdict=verdict,
            logprobs=None if ratios is None else float(ratios.max()) / limit,
            past_end=plain.figures.past_end,
            in_dtype=True,
            reason=reason,
        )

    # ---- how log probabilities were taken

    def _with_processing(self, report: TextReport) -> TextReport:
        """Name how log probabilities were taken that are not the model's, where one way explains all of them."""
        numbers = [number for number, result in enumerate(report.texts) if result.has_other_logprobs]
        exact = [number for number in numbers if number in self.exact and not self.exact[number].decides]
        if not exact:
            return report
        for processing in self._processings(exact):
            ratios = self._ratios_of_processing(processing, exact[:_MOST_EXPLAINED])
            if ratios is not None:
                return self._as_processed(report, processing, numbers, ratios)
        return report

    def _processings(self, numbers: Sequence[int]) -> Iterator[Processing]:
        """Yield ways in which log probabilities of wrong texts may have been taken, the one that is stated first."""
        options = self.run.options
        stated = {self.sampling(number) for number in numbers}
        sampling = stated.pop() if len(stated) == 1 else None
        for after in dict.fromkeys([_sampling_of_logprobs(options, sampling), sampling]):
            if after is not None and str(after):
                yield Processing(sampling=after)
                yield Processing(sampling=after, is_end_masked=True)
        yield from self._fitted_processings(numbers[:_MOST_FITTED_TEXTS])

    def _fitted_processings(self, numbers: Sequence[int]) -> list[Processing]:
        """Return ways whose parameters are fitted to the tokens of some texts together."""
        rows: list[tuple[torch.Tensor, ...]] = []
        for number in numbers:
            text = self.exact[number]
            logprobs, logits = text.tokens.judged_logprobs, text.logits()
            assert logprobs is not None
            is_given = logprobs.isfinite()
            values = (logits.own, logits.without_ends, text.chosen, logprobs, text.allowed_logprobs)
            rows.append(tuple(value[is_given] for value in values))
        own, without_ends, chosen, wanted, allowed = (torch.cat(values) for values in zip(*rows, strict=True))
        return processings_of(wanted, Logits(own=own, without_ends=without_ends), chosen, allowed)

    def _ratios_of_processing(self, processing: Processing, numbers: Sequence[int]) -> dict[int, float] | None:
        """Return the largest ratio of each text where a way explains all of them, else None."""
        ratios = {}
        for number in numbers:
            step = functools.partial(self.step, number)
            ratios[number] = self.exact[number].ratio_of_processing(processing, step)
            if not ratios[number] <= 1:
                return None
        return ratios

    def _as_processed(
        self, report: TextReport, processing: Processing, numbers: Sequence[int], ratios: dict[int, float]
    ) -> TextReport:
        """Return the report with the way in which log probabilities were taken, of each text that it explains."""
        results = list(report.texts)
        for number in numbers:
            result = results[number]
            if number not in ratios:
                plain = plain_text(self.run.model, self.tokens[number], processing=processing)
                ratios[number] = self.screen.ratio(plain) / _FAR_OUTSIDE
            if not ratios[number] <= 1:
                continue
            verdict: Verdict = "sampled" if result.verdict == "undecided" else result.verdict
            result = msgspec.structs.replace(result, logprobs_of=processing.name, verdict=verdict, reason="")
            is_stated = _sampling_of_logprobs(self.run.options, self.sampling(number)) == processing.sampling
            if is_stated and not processing.is_end_masked:
                result = msgspec.structs.replace(result, logprobs=ratios[number], worst_logprob=None)
                self.plain.pop(number, None)  # its differences from the model's own are none of rounding
            results[number] = result
        return msgspec.structs.replace(report, texts=tuple(results))

    # ---- all texts together

    def _with_summary(self, report: TextReport) -> TextReport:
        """Add the figures of all log probabilities, where some came with the texts."""
        distinct = self._distinct(sorted(self.plain))
        differences = [self.plain[number].differences for number in distinct]
        with_logprobs = [of_text for of_text in differences if of_text is not None]
        sample = [self.exact[number] for number in self.sample]
        digits = max(tokens.logprob_rounding for tokens in self.tokens)
        rounding = digits + log_softmax_error(sample[0].exact.vocabulary)
        of_trainer = [self.plain[number].trainer_differences for number in distinct]
        report = msgspec.structs.replace(
            report,
            summary=summarize(with_logprobs, sample, rounding),
            trainer=summarize([of_text for of_text in of_trainer if of_text is not None], sample, rounding),
        )
        if report.summary is None or not report.summary.is_beyond:
            return report
        if any(result.has_other_logprobs for result in report.texts):
            return report
        summary = msgspec.structs.replace(report.summary, way=self._way_of_all(report.summary))
        return msgspec.structs.replace(report, summary=summary)

    def _distinct(self, numbers: Sequence[int]) -> list[int]:
        """Return the texts of these, each once: equal ones tell no more than one of them."""
        first = dict[tuple[tuple[int, ...], tuple[int, ...]], int]()
        for number in numbers:
            tokens = self.tokens[number]
            first.setdefault((tuple(tokens.prompt), tuple(tokens.ids)), number)
        return list(first.values())

    def _way_of_all(self, summary: LogprobSummary) -> str:
        """Return how log probabilities were taken that are off as a whole, and by no token alone; empty for no way.

        The way is the one that leaves the smallest errors, and has to leave no more than healthy passes have.
        """
        numbers = [number for number in self.sample if self.exact[number].tokens.judged_logprobs is not None]
        if not numbers or any(self.exact[number].decides for number in numbers):
            return ""
        residuals: dict[Processing, list[torch.Tensor]] = {}
        for number in numbers:
            for processing, of_text in self._residuals(number).items():
                residuals.setdefault(processing, []).append(of_text)
        scores = {processing: score_of(processing, torch.cat(of_way)) for processing, of_way in residuals.items()}
        nearest = min(scores, key=lambda processing: scores[processing])
        of_way = summarize(residuals[nearest], [self.exact[number] for number in numbers])
        if of_way is None or of_way.is_beyond:
            return ""
        # so much nearer than the model's own that chance is no reason
        return nearest.name if abs(of_way.found.mean) < abs(summary.found.mean) / 3 else ""

    def _residuals(self, number: int) -> dict[Processing, torch.Tensor]:
        """Return the differences of a text's log probabilities from those of each usual sampler."""
        text = self.exact[number]
        wanted, logits = text.tokens.judged_logprobs, text.logits()
        assert wanted is not None
        residuals = {}
        for is_end_masked in (False, True) if logits.masks_end else (False,):
            ranking = Ranking.of(logits.of(is_end_masked=is_end_masked), text.chosen, 1.0)
            for sampling in (*USUAL_SAMPLERS, *((Sampling(),) if is_end_masked else ())):
                processing = Processing(sampling=sampling, is_end_masked=is_end_masked)
                residuals[processing] = wanted - ranking.logprobs(sampling)
        return residuals

    def _with_surprise(self, report: TextReport) -> TextReport:
        """Add by how much the tokens of texts that came as sampled are less likely than draws are."""
        excess = variance = 0.0
        tokens = 0
        for number, tokens_of_text in enumerate(self.tokens):
            sampling = self.sampling(number)
            if sampling is None or report.texts[number].verdict == "undecided":
                continue
            change = active(self.run.model, self.writers[number]) if self._is_of_another(number) else None
            self.step(number, "as draws")
            logits = plain_logits(self.run.model, tokens_of_text, change)
            surprises, variances = surprise_of(Processing(sampling=sampling), logits, chosen_ids(tokens_of_text))
            excess += float(surprises.sum())
            variance += float(variances.sum())
            tokens += len(surprises)
        if tokens < _LEAST_DRAWS or variance <= 0:
            return report
        return msgspec.structs.replace(report, surprise=excess / math.sqrt(variance))

    # ---- what explains wrong texts

    def _with_causes(self, report: TextReport) -> TextReport:
        """Name the mistakes that explain the wrong texts, or that would have written sampled ones greedily."""
        wrong = [number for number, result in enumerate(report.texts) if self._is_to_explain(number, result)]
        if not wrong:
            return self._with_greedy_causes(report)
        causes = causes_of(self._asked(wrong))
        if causes is not None:
            return _as_explained(report, causes, wrong, min(len(wrong), _MOST_EXPLAINED))
        by_arithmetic = self._explained_by_arithmetic(report, wrong)
        if by_arithmetic is not None:
            return by_arithmetic
        return msgspec.structs.replace(report, leaning=self._leaning())

    def _explained_by_arithmetic(self, report: TextReport, wrong: Sequence[int]) -> TextReport | None:
        """Return the report where another arithmetic of the writer explains the wrong texts; None where none does.

        One that engines have by default is no fault where no engine is stated: all texts are judged again by it. Any
        other one is named as the cause.
        """
        if self.is_found or self.run.options.kv_dtype or any(self.exact[number].decides for number in wrong):
            return None
        arithmetic = self._fitting_arithmetic(wrong)
        if arithmetic is None:
            return None
        if not self.run.options.engine and engines_with(arithmetic, _dtype_of(self.run.model)):
            return self._report_in(arithmetic)
        cause, about = TextCause.CACHE, arithmetic.kv_dtype
        if arithmetic.computes_in:
            cause, about = TextCause.COMPUTED_IN, arithmetic.computes_in
        drawn = any(not self.exact[number].in_arithmetic(arithmetic).is_greedy for number in self._tried_on(wrong))
        extent = Extent.LOGPROBS if drawn else Extent.TOKENS
        return _as_explained(report, Causes(about={cause: about}, extent=extent), wrong, len(self._tried_on(wrong)))

    def _report_in(self, arithmetic: EngineArithmetic) -> TextReport | None:
        """Return the report of all texts as judged by an arithmetic; None where they lean to a mistake nonetheless."""
        judging = _Judging(
            run=self.run,
            texts=self.texts,
            tokens=list(self.tokens),
            plain={number: plain for number, plain in self.plain.items() if number not in self.writers},
            arithmetic=arithmetic,
            is_found=True,
        )
        judging.judge()
        report = judging.report()
        if report.leaning:
            return None
        return msgspec.structs.replace(report, cache=arithmetic.kv_dtype, computed_in=arithmetic.computes_in)

    def _fitting_arithmetic(self, wrong: Sequence[int]) -> EngineArithmetic | None:
        """Return the arithmetic that fits wrong texts best, of those that explain all that they are tried on.

        An arithmetic whose rounding is so large that the base alone would be explained too tells nothing. Without log
        probabilities no errors are seen whose size would tell one from another, so only those that engines have by
        default are tried.
        """
        dtype = _dtype_of(self.run.model)
        numbers = self._tried_on(wrong)
        likelihoods: dict[EngineArithmetic, float] = {}
        has_logprobs = all(self.tokens[number].judged_logprobs is not None for number in numbers)
        for arithmetic in others_than(dtype):
            if not has_logprobs and not engines_with(arithmetic, dtype):
                continue
            judged = list(self._explained_in(arithmetic, numbers))
            if len(judged) < len(numbers) or (has_logprobs and not _are_by_chance(judged)):
                continue
            if self.run.has_adapter and all(_is_explained_without(text) for text in judged):
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

    def _explained_in(self, arithmetic: EngineArithmetic, numbers: Sequence[int]) -> Iterator[JudgedText]:
        """Yield texts as judged by an arithmetic, up to the first that it does not explain."""
        for number in numbers:
            judged = self.exact[number].in_arithmetic(arithmetic)
            if not _is_right(judged):
                return
            yield judged

    def _tried_on(self, wrong: Sequence[int]) -> list[int]:
        """Return the wrong texts that arithmetics are tried on: some with log probabilities, where any have them."""
        with_logprobs = [number for number in wrong if self.tokens[number].judged_logprobs is not None]
        by_length = sorted(with_logprobs or wrong, key=lambda number: self._length(number))
        return by_length[:_MOST_IN_ARITHMETICS]

    def _length(self, number: int) -> int:
        return len(self.tokens[number].ids) + len(self.tokens[number].prompt)

    def _is_to_explain(self, number: int, result: TextResult) -> bool:
        return result.is_unexplained and number in self.exact

    def _asked(self, numbers: Sequence[int]) -> list[AskedText]:
        # short texts first, as each cause takes a pass over one
        by_length = sorted(numbers, key=lambda number: self._length(number))
        run = self.run
        return [
            AskedText(text=self.texts[number], judged=self.exact[number], tokenizer=run.tokenizer, others=run.others)
            for number in by_length[:_MOST_EXPLAINED]
        ]

    def _with_greedy_causes(self, report: TextReport) -> TextReport:
        """Name a mistake that makes every token of sampled texts the most likely one: they were written so, not drawn.

        In a half type log probabilities may be within tolerance where a token is not. Asked of a few texts alone, and
        of such as have few tokens that are not the most likely ones.
        """
        sampled = [
            number
            for number, result in enumerate(report.texts)
            if result.verdict == "sampled" and number in self.exact and self.sampling(number) is None
        ]
        unlikely = sum(report.texts[number].unlikely for number in sampled)
        tokens = sum(report.texts[number].tokens for number in sampled)
        if not sampled or len(self.texts) > _SAMPLE or unlikely > _MOST_UNLIKELY * tokens:
            return report
        causes = causes_of(self._asked(sampled[:2]), greedily=True)
        if causes is None:
            return report
        return _as_explained(report, causes, sampled, min(len(sampled), 2))

    def _leaning(self) -> str:
        """Return what the log probabilities lean to as a whole, of scalings of the adapter; empty where to nothing."""
        if not self.run.has_adapter:
            return ""
        differences, directions = [], []
        for number in self._distinct(list(self.exact)):
            text = self.exact[number]
            wanted = text.tokens.judged_logprobs
            if wanted is None or text.decides or self._is_of_another(number):
                continue
            is_given = wanted.isfinite()
            without = figures_without_adapter(text)
            differences.append((wanted - text.exact.logprobs)[is_given])
            directions.append((without.logprobs - text.exact.logprobs)[is_given])
        return leaning_to(differences, directions)

    # ---- what the texts cannot tell

    def _with_what_is_not_told(self, report: TextReport) -> TextReport:
        """Say whether the base alone could have written all texts, and what they lean to."""
        if not self.run.has_adapter or report.verdict != "consistent":
            return report
        report = msgspec.structs.replace(report, leaning=self._leaning())
        texts = [self.exact[number] for number in self.sample if not self._is_of_another(number)]
        without = [figures_without_adapter(text) for text in texts]
        could_write = [_could_write(text, figures) for text, figures in zip(texts, without, strict=True)]
        if not texts or not all(could_write):
            return report
        told = Told(phrase="whether the adapter is on", tokens=tokens_to_tell(texts, without))
        return msgspec.structs.replace(report, base_alone=True, told=(told,))


_MOST_UNLIKELY = 0.25
"""Fraction of tokens that are not the most likely ones, up to which sampled texts may have been written greedily."""

_LEAST_DRAWS = 100
"""Tokens from which on the mean of their likelihood is nearly that of a normal distribution."""


def _dtype_of(model: torch.nn.Module) -> str:
    return name_of(next(p.dtype for p in model.parameters() if p.is_floating_point()))


_UNDECIDED = "a router or another selection may have chosen otherwise by rounding: not judged"
_TOO_MANY = "further from the model than two healthy devices commonly are; too many such texts to judge all in float64"


def _verdict(text: JudgedText, *, has_logprobs: bool, are_wrong: bool, is_stated: bool, is_outside: bool) -> Verdict:
    """Return the verdict on the tokens of a text.

    Parameters
    ----------
    are_wrong : bool
        The log probabilities that came with it are not the model's.
    is_stated : bool
        How it was sampled is stated.
    is_outside : bool
        A token is none of those that the sampler leaves.
    """
    if text.decides and (are_wrong or (not text.is_greedy and not has_logprobs)):
        return "undecided"
    if text.is_greedy:
        return "possible"
    if is_outside:
        return "impossible"
    return "sampled" if has_logprobs or is_stated else "impossible"


def _outside_of_sampling(sampling: Sampling | None, text: JudgedText) -> str:
    """Return which token a sampler could not have drawn; empty where it could have drawn each."""
    if sampling is None or not sampling.leaves_out or text.decides:
        return ""
    outside = Processing(sampling=sampling).places_outside(text.logits(), text.chosen, text.allowed_gaps)
    if not len(outside):
        return ""
    token = text.places[int(outside[0])] + 1
    return f"token {token} is none of those that {sampling} leaves, whatever rounding does"


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
