"""Judge each text by itself: a sample in float64, the others by one pass in the dtype, those far off in float64 too."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from consistency.extras.serving.check_text.arithmetic import OWN, EngineArithmetic
from consistency.extras.serving.check_text.computed_in_parts import active, can_disable
from consistency.extras.serving.check_text.judged_text import JudgedText, Step, chosen_ids
from consistency.extras.serving.check_text.options import TextOptions
from consistency.extras.serving.check_text.power import written_by
from consistency.extras.serving.check_text.processing import Processing
from consistency.extras.serving.check_text.report import TextResult, Verdict
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.screening import PlainText, Screen, plain_text
from consistency.extras.serving.check_text.texts import Text, Tokens
from consistency.extras.serving.engine_outputs.passes import Room
from consistency.numerics.dtype import name_of

SAMPLE = 8
"""Texts that are judged in float64, whatever the screen says of them."""

_MOST_SUSPICIOUS = 16
"""Texts more that are judged in float64, those that are furthest from a pass in the dtype."""

MOST_EXPLAINED = 6
"""Wrong texts that causes are tried on."""

FAR_OUTSIDE = 4.0
"""Ratio of the screen from which on a text is wrong that could not be judged in float64 for the number of those."""

_KEPT_BYTES = 1 << 30
"""Bytes of logits that are kept: an eighth of the 8 GB of the smallest host that is supported."""

_UNDECIDED = "a router or another selection may have chosen otherwise by rounding: not judged"
_TOO_MANY = "further from the model than two healthy devices commonly are; too many such texts to judge all in float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
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


@dataclass(slots=True, kw_only=True)
class Judging:
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
    room : Room
        Room for the logits of texts that are judged in float64, which explanations ask for again.
    processing : Processing or None
        How the log probabilities of the sample were taken, where that was found: the others' are computed so too.
    sought_in_vain : tuple of int
        Texts whose log probabilities no such way explains.
    is_found : bool
        That it computes so was found here, and is not looked for again.
    """

    run: Run
    texts: Sequence[Text]
    tokens: list[Tokens]
    sample: list[int] = field(default_factory=list)
    exact: dict[int, JudgedText] = field(default_factory=dict)
    plain: dict[int, PlainText] = field(default_factory=dict)
    writers: dict[int, str] = field(default_factory=dict)
    arithmetic: EngineArithmetic = OWN
    is_found: bool = False
    room: Room = field(default_factory=lambda: Room(_KEPT_BYTES))
    processing: Processing | None = None
    sought_in_vain: tuple[int, ...] = ()
    screen: Screen = field(init=False)

    def judge(self) -> None:
        """Judge a sample of the texts in float64, screen the others, and judge those in float64 that stand out."""
        self.judge_sample()
        self.judge_rest()

    def judge_sample(self) -> None:
        """Judge texts in float64 that are spread over all."""
        count = len(self.texts)
        evenly = {round(number * (count - 1) / max(1, SAMPLE - 1)) for number in range(SAMPLE)}
        self.sample = sorted(number for number in evenly if number < count)
        for number in self.sample:
            self._judge_exactly(number)
        self.screen = Screen.of([self.exact[number] for number in self.sample])

    def judge_rest(self) -> None:
        """Screen all texts but those of the sample, and judge those in float64 that stand out."""
        count = len(self.texts)
        has_logprobs = any(
            tokens.judged_logprobs is not None or tokens.judged_trainer_logprobs is not None for tokens in self.tokens
        )
        rest = [number for number in range(count) if number not in self.exact]
        # the figures of all log probabilities are of passes in the dtype
        for number in range(count) if has_logprobs or self.run.others else rest:
            if number in self.plain:
                continue
            self.step(number, "in the dtype")
            self.plain[number] = plain_text(self.run.model, self.tokens[number], also_by=self.processing)
        self._find_writers()
        ratios = {number: self.screen.ratio(self.plain[number]) for number in rest}
        suspicious = [number for number in rest if not ratios[number] <= 1 and not self.is_of_another(number)]
        suspicious.sort(key=lambda number: -ratios[number])
        self._judge_suspicious(suspicious, ratios)

    def _judge_suspicious(self, suspicious: Sequence[int], ratios: Mapping[int, float]) -> None:
        """Judge texts in float64 that stand out, the furthest first.

        Once as many are wrong as causes are tried on, those that are far outside need no float64 to be wrong too.
        """
        judged = 0
        wrong = sum(self.exact_result(number).is_unexplained for number in self.sample)
        for number in suspicious:
            if judged == _MOST_SUSPICIOUS:
                return
            if wrong >= MOST_EXPLAINED and ratios[number] > FAR_OUTSIDE:
                continue
            self._judge_exactly(number)
            judged += 1
            wrong += self.exact_result(number).is_unexplained

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
        judged = JudgedText.of(
            self.run.model, self.tokens[number], self.run.tokenizer, step, self.arithmetic, room=self.room
        )
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
            writer = written_by(plain_texts, self.screen, is_sampled=is_sampled, far=FAR_OUTSIDE)
            if writer:
                self.writers[number] = writer
                self.plain[number] = plain_texts[writer]

    def is_of_another(self, number: int) -> bool:
        """Report whether another adapter than the first wrote a text."""
        return self.writers.get(number, self.run.first) != self.run.first

    def results(self) -> tuple[TextResult, ...]:
        """Return the result of each text by itself."""
        return tuple(self._result(number) for number in range(len(self.texts)))

    def distinct(self, numbers: Sequence[int]) -> list[int]:
        """Return the texts of these, each once: equal ones tell no more than one of them."""
        first = dict[tuple[tuple[int, ...], tuple[int, ...]], int]()
        for number in numbers:
            tokens = self.tokens[number]
            first.setdefault((tuple(tokens.prompt), tuple(tokens.ids)), number)
        return list(first.values())

    def _result(self, number: int) -> TextResult:
        is_judged_exactly = number in self.exact and not self.is_of_another(number)
        result = self.exact_result(number) if is_judged_exactly else self._screened_result(number)
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

    def exact_result(self, number: int) -> TextResult:
        """Return the result of a text that is judged in float64."""
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
        limit = FAR_OUTSIDE if number in self.writers else 1.0
        if not ratio <= FAR_OUTSIDE:
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


def dtype_of(model: torch.nn.Module) -> str:
    """Return the name of the dtype of a model's first parameter that is a float."""
    return name_of(next(p.dtype for p in model.parameters() if p.is_floating_point()))


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
