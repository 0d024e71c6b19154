"""The result of `check-text`: a statement on the tokens of all texts, and one on log probabilities. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from consistency.capture.explanation import Explanation
from consistency.capture.wording import counted
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.summary import LogprobSummary
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.engines import ENGINES

SCHEMA = "consistency.text/3"

Verdict = Literal["possible", "sampled", "impossible", "undecided"]
LogprobVerdict = Literal["right", "explained", "wrong"]

_MOST_SHOWN = 5
"""Texts that sentences are printed on; the rest are counted."""


class TokenGap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token of a text whose exact logit is not the largest.

    Attributes
    ----------
    token : int
        Place of the token in the text, from 1 on.
    id, largest_id : int
        Id of the token, and of the one with the largest exact logit.
    text, largest_text : str
        The two in words, where the base has a tokenizer; else empty.
    gap, allowed : float
        Gap between their exact logits, and what rounding may do to it.
    """

    token: int
    id: int
    largest_id: int
    gap: float
    allowed: float
    text: str = ""
    largest_text: str = ""

    def sentence(self) -> str:
        """Return the token and its gap in words, without a verdict."""
        token, largest = _token_words(self.text, self.id), _token_words(self.largest_text, self.largest_id)
        return (
            f"{token} at token {self.token} is {self.gap:.3g} below {largest}, of which rounding explains "
            f"{self.allowed:.2g}"
        )


class LogprobGap(msgspec.Struct, frozen=True, kw_only=True):
    """A log probability that is not the model's.

    Attributes
    ----------
    token : int
        Place of the token in the text, from 1 on.
    given, exact, allowed : float
        The log probability that came with the text, the exact one, and what rounding may do to it.
    """

    token: int
    given: float
    exact: float
    allowed: float

    def sentence(self) -> str:
        """Return the log probability and its error in words, without a verdict."""
        side = "above" if self.given > self.exact else "below"
        return (
            f"that of token {self.token}, {self.given:.3g}, is {abs(self.given - self.exact):.2g} {side} the model's, "
            f"of which rounding explains {self.allowed:.2g}"
        )


class TextResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one text.

    Attributes
    ----------
    tokens, largest, tied : int
        Numbers of all tokens, of those with the largest exact logit, and of those that rounding may put above it.
    verdict : str
        The verdict on the tokens: `possible` if each is the most likely one but for rounding; `sampled` if not, and the
        text came with log probabilities, or as sampled; `impossible`; `undecided` where a router may have chosen
        otherwise.
    name : str
        Where the text stands in its file.
    worst : TokenGap or None
        The first token that is impossible, else the tied one with the largest gap over what is allowed.
    logprobs : float or None
        The largest error of the given log probabilities over what rounding may do; over 1 they are not the model's.
    logprobs_of : str
        How they were taken from its logits then, where it is known: `temperature 0.7`, `the end of the text masked`.
    worst_logprob : LogprobGap or None
        The log probability with that error, where it is over 1.
    past_end : int
        Tokens in whose place the model would have ended the text: they are judged among those that go on.
    in_dtype : bool
        Judged by one pass in the dtype alone, which is near enough: its counts are of that pass.
    adapter : str
        Name of the adapter that wrote it, where several were given and one of them is told.
    step : str
        Training step, or version of the weights, that the file names for it.
    trainer_logprobs : float or None
        As `logprobs`, of the trainer's log probabilities where the file has these too.
    doubt : str
        Why the text may have other tokens than were written.
    reason : str
        Why it is undecided, or impossible as a sampled text.
    """

    tokens: int
    largest: int
    tied: int
    verdict: Verdict
    name: str = ""
    worst: TokenGap | None = None
    logprobs: float | None = None
    logprobs_of: str = ""
    worst_logprob: LogprobGap | None = None
    past_end: int = 0
    in_dtype: bool = False
    adapter: str = ""
    step: str = ""
    trainer_logprobs: float | None = None
    doubt: str = ""
    reason: str = ""

    @property
    def has_other_logprobs(self) -> bool:
        """Report whether log probabilities came with the text that are not the model's."""
        return self.logprobs is not None and not self.logprobs <= 1  # of NaN, yes

    @property
    def has_other_trainer_logprobs(self) -> bool:
        """Report whether the trainer's log probabilities came with the text, and are not the model's."""
        return self.trainer_logprobs is not None and not self.trainer_logprobs <= 1

    @property
    def is_unexplained(self) -> bool:
        """Report whether something is wrong, and the text itself does not tell the cause."""
        return self.verdict in ("impossible", "undecided") or (self.has_other_logprobs and not self.logprobs_of)

    @property
    def unlikely(self) -> int:
        """Return how many tokens are not the most likely ones, whatever rounding does."""
        return self.tokens - self.largest - self.tied


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """How much the texts can tell of something that they do not tell.

    Attributes
    ----------
    phrase : str
        What cannot be told from the right model.
    tokens : int or None
        So many more tokens would tell it, by how near the two are; None where no number of tokens is known.
    """

    phrase: str
    tokens: int | None = None

    def sentence(self) -> str:
        """Return what is not told, and what would tell it."""
        if self.tokens is None:
            return f"these texts do not tell {self.phrase}"
        return f"these texts do not tell {self.phrase}: some {_rounded(self.tokens):,} tokens more would"


class TextReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The results of all texts, and the mistakes that explain them.

    Attributes
    ----------
    dtype : str
        The dtype that the writer is said to have used.
    texts : tuple of TextResult
        In the order of the file.
    summary : LogprobSummary or None
        The log probabilities of all texts beside those of two healthy passes; None where none came with a text.
    trainer : LogprobSummary or None
        The same of the trainer's log probabilities, where the file has these too.
    causes : tuple of str
        Kinds of mistakes, each of which would have written every impossible text.
    logprob_causes : tuple of str
        Kinds of mistakes, each of which would have given every log probability that is not the model's.
    about : dict
        What a cause is about, such as the name of an adapter, by the cause.
    explained : int
        Wrong texts that the causes were tried on; they explain all of these.
    base_alone : bool
        The base without the adapter could have written all of them too, so they do not tell whether it was applied.
    told : tuple of Told
        What these texts cannot tell, with how many more tokens would.
    not_tried : tuple of str
        Mistakes that this model is too large or too different for, where none of the others explains the texts.
    leaning : str
        A mistake that the log probabilities lean to, though each is within what rounding makes, and how far.
    cache, computed_in : str
        Dtype of keys and values, and dtype in which all was computed, that explain texts which are further off than the
        model's own dtype makes them; empty for the model's own.
    surprise : float or None
        Of texts that came as sampled: by how many standard deviations their tokens are less likely than draws are.
    """

    dtype: str
    texts: tuple[TextResult, ...]
    summary: LogprobSummary | None = None
    trainer: LogprobSummary | None = None
    causes: tuple[str, ...] = ()
    logprob_causes: tuple[str, ...] = ()
    about: dict[str, str] = {}
    explained: int = 0
    base_alone: bool = False
    told: tuple[Told, ...] = ()
    not_tried: tuple[str, ...] = ()
    leaning: str = ""
    cache: str = ""
    computed_in: str = ""
    surprise: float | None = None
    schema: str = SCHEMA

    @property
    def verdict(self) -> str:
        """Return `consistent`, `inconsistent`, or `incomplete` where a text is undecided and nothing else is wrong.

        Log probabilities that are not the model's are inconsistent, though it could have written the tokens: who trains
        on them is misled.
        """
        wrong = ("explained", "wrong")
        if self.tokens_verdict == "impossible" or self.logprobs_verdict in wrong or self.trainer_verdict in wrong:
            return "inconsistent"
        return "incomplete" if self.tokens_verdict == "undecided" else "consistent"

    @property
    def tokens_verdict(self) -> Verdict:
        """Return the verdict on the tokens of all texts: the worst of them."""
        verdicts = {result.verdict for result in self.texts}
        if self.surprise is not None and self.surprise > MOST_SURPRISE:
            return "impossible"
        kinds: tuple[Verdict, ...] = ("impossible", "undecided", "sampled")
        return next((kind for kind in kinds if kind in verdicts), "possible")

    @property
    def logprobs_verdict(self) -> LogprobVerdict | None:
        """Return the verdict on the log probabilities of all texts; None where none came with a text.

        Those of a text that is undecided are not judged.
        """
        judged = [result for result in self.texts if result.logprobs is not None and result.verdict != "undecided"]
        if not judged:
            return None
        others = [result for result in judged if result.has_other_logprobs]
        if not others:
            if self.summary is None or not self.summary.is_beyond:
                return "right"
            return "explained" if self.summary.way or self.logprob_causes else "wrong"
        is_explained = bool(self.causes or self.logprob_causes) or all(result.logprobs_of for result in others)
        return "explained" if is_explained else "wrong"

    @property
    def trainer_verdict(self) -> LogprobVerdict | None:
        """Return the verdict on the trainer's log probabilities; None where the file has none."""
        judged = [result for result in self.texts if result.trainer_logprobs is not None]
        judged = [result for result in judged if result.verdict != "undecided"]
        if not judged:
            return None
        is_beyond = self.trainer is not None and self.trainer.is_beyond
        return "wrong" if is_beyond or any(result.has_other_trainer_logprobs for result in judged) else "right"

    @property
    def exit_status(self) -> int:
        """Return 0, 1 or 3."""
        return {"consistent": 0, "inconsistent": 1, "incomplete": 3}[self.verdict]

    def to_builtins(self) -> dict[str, Any]:
        """Return the report as JSON has it, with the verdicts."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        verdicts = {
            "tokens_verdict": self.tokens_verdict,
            "logprobs_verdict": self.logprobs_verdict,
            "trainer_verdict": self.trainer_verdict,
        }
        return {"schema": self.schema, "verdict": self.verdict, **verdicts, **fields}

    # ---- in words

    def lines(self) -> Iterator[str]:
        """Yield the lines to print: the two statements, what is wrong in each text, and the cause with what to do."""
        heading = {"consistent": "CONSISTENT", "inconsistent": "INCONSISTENT", "incomplete": "INCOMPLETE"}
        yield f"{heading[self.verdict]}   {self._statement_on_tokens()}"
        statement = self._statement_on_logprobs()
        if statement:
            yield f"log probabilities: {statement}"
        if self.summary is not None:
            yield from self.summary.lines(self.dtype)
        if self.trainer_verdict is not None:
            others = sum(result.has_other_trainer_logprobs for result in self.texts)
            count = sum(result.trainer_logprobs is not None for result in self.texts)
            statement = f"the model's, in {counted(count, 'text')}"
            if self.trainer_verdict == "wrong":
                statement = f"those of {others} of {counted(count, 'text')} are not the model's"
                if not others:
                    statement = "off as a whole by more than rounding explains"
            yield f"the trainer's log probabilities: {statement}"
            if self.trainer is not None:
                yield f"  the trainer's: {self.trainer.found.words()}"
        yield from self._lines_on_texts()
        yield from self._lines_on_arithmetic()
        yield from self._lines_on_causes()
        for told in self.told:
            yield told.sentence()
        adapters = Counter(result.adapter for result in self.texts if result.adapter)
        if adapters:
            counts = ", ".join(f"{name} {count}" for name, count in adapters.items())
            untold = len(self.texts) - sum(adapters.values())
            rest = f"; of {untold} it cannot be told" if untold else ""
            yield f"written by: {counts}{rest}"

    def _statement_on_tokens(self) -> str:
        count = counted(len(self.texts), "text")
        verdict = self.tokens_verdict
        if verdict == "impossible":
            impossible = sum(result.verdict == "impossible" for result in self.texts)
            if not impossible:
                return (
                    f"the tokens are less likely than draws from this model are, by {self.surprise:.3g} standard "
                    "deviations: another model, adapter or sampler has written them"
                )
            return f"the model could not have written {impossible} of {count}"
        if verdict == "undecided":
            undecided = sum(result.verdict == "undecided" for result in self.texts)
            return f"{undecided} of {count} not judged"
        texts = "the text" if len(self.texts) == 1 else f"all {len(self.texts)} texts"
        tokens = sum(result.tokens for result in self.texts)
        tied = sum(result.tied for result in self.texts)
        unlikely = sum(result.unlikely for result in self.texts)
        kinds = f"{tied} of them nearly tied with the largest"
        if unlikely:
            kinds = f"{unlikely} of them not the most likely ones: sampled"
        return f"the model could have written {texts}: {counted(tokens, 'token')}, {kinds}"

    def _statement_on_logprobs(self) -> str:
        verdict = self.logprobs_verdict
        if verdict is None:
            return ""
        judged = [result for result in self.texts if result.logprobs is not None]
        others = [result for result in judged if result.has_other_logprobs]
        if verdict == "right":
            return f"the model's, in {counted(len(judged), 'text')}"
        if not others:
            assert self.summary is not None
            if self.summary.way:
                return f"off as a whole, though each by itself is within rounding: taken with {self.summary.way}"
            return "off as a whole by more than rounding explains, though each by itself is within it"
        of = f"{len(others)} of {counted(len(judged), 'text')}"
        ways = sorted({result.logprobs_of for result in others if result.logprobs_of})
        if ways and not (self.causes or self.logprob_causes):
            return f"those of {of} were taken with {' or '.join(ways)}"
        return f"those of {of} are not the model's"

    def _lines_on_texts(self) -> Iterator[str]:
        named = {number: result.name or f"text {number}" for number, result in enumerate(self.texts, 1)}
        sentences_of = {number: list(self._sentences(result)) for number, result in enumerate(self.texts, 1)}
        with_sentences = [number for number, sentences in sentences_of.items() if sentences]
        for number in with_sentences[:_MOST_SHOWN]:
            for sentence in sentences_of[number]:
                yield f"{named[number]}: {sentence}"
        if len(with_sentences) > _MOST_SHOWN:
            yield f"… and {len(with_sentences) - _MOST_SHOWN} texts more, which --json lists"

    def _sentences(self, result: TextResult) -> Iterator[str]:
        """Yield the sentences on one text: why it is not judged, or what is wrong with it."""
        if result.reason:
            yield result.reason
        elif result.verdict == "impossible" and result.worst is not None:
            yield result.worst.sentence()
            if not self.causes:
                yield from _pattern(result)
        # a cause of all texts explains their log probabilities too
        is_wrong = result.has_other_logprobs and result.verdict != "undecided" and not self.causes
        if is_wrong and result.worst_logprob is not None and not result.logprobs_of:
            yield f"its log probabilities are not the model's: {result.worst_logprob.sentence()}"
        if result.past_end:
            yield f"goes on where the model would have ended it, at {counted(result.past_end, 'token')}"
        if result.doubt and result.is_unexplained and result.doubt != result.reason:
            yield result.doubt

    def _lines_on_arithmetic(self) -> Iterator[str]:
        if self.cache:
            option = f"--kv-dtype {self.cache}"
            yield f"explained by keys and values in {self.cache}, as {self._engines('kv_dtypes', self.cache, option)}"
        if self.computed_in:
            option = f"--dtype {self.computed_in}"
            yield (
                f"explained by computing in {self.computed_in}, as "
                f"{self._engines('computes_in', self.computed_in, option)}"
            )

    def _engines(self, fact: str, dtype: str, option: str) -> str:
        """Return which engines do so by default, and the options that say it."""
        names = [name for name, engine in ENGINES.items() if getattr(engine, fact).get(self.dtype) == dtype]
        verb = "do" if len(names) > 1 else "does"
        return f"{' and '.join(names)} {verb} by default: say it by --engine {names[0]}, or {option}"

    def _lines_on_causes(self) -> Iterator[str]:
        causes = _explanations(self.causes or self.logprob_causes)
        if causes:
            phrases = " or ".join(self._phrase(cause) for cause in causes)
            tried = ""
            wrong = sum(result.is_unexplained for result in self.texts)
            if self.explained < wrong:
                tried = f" (tried on {self.explained} of {wrong} texts that are wrong)"
            if self.causes:
                yield f"written {phrases}{tried}"
            else:
                yield f"the log probabilities were computed {phrases}{tried}"
            yield f"next: {causes[0].todo}"
            return
        if self.leaning:
            yield self.leaning
        if self.not_tried:
            yield f"not tried with this model: {'; '.join(self.not_tried)}"
        if any(result.logprobs_of for result in self.texts) or (self.summary is not None and self.summary.way):
            yield f"next: {_RAW}"
        elif self.verdict == "inconsistent":
            yield f"next: {_UNEXPLAINED}"
        if self.base_alone:
            yield "the base alone could have written all of it too: the text does not tell whether the adapter is on"

    def _phrase(self, cause: Explanation) -> str:
        about = self.about.get(str(cause.value), "")
        return cause.phrase.replace("{}", about or "some layers")


MOST_SURPRISE = 6.0
"""Standard deviations by which tokens may be less likely than draws: a normal deviate exceeds it once in 10⁹."""

_RAW = (
    "have the engine give the model's own log probabilities (vLLM: logprobs_mode raw_logprobs), or divide by the same "
    "temperature in the trainer; `--logprobs processed` with the sampler's settings checks them as they are"
)
_UNEXPLAINED = (
    "if earlier checkpoints may have written these texts, name them by --adapter NAME=PATH, several; if the writer "
    "computes in another dtype, or keeps keys and values in another one, say so by --dtype, --kv-dtype and --engine"
)


def _explanations(values: tuple[str, ...]) -> list[Explanation]:
    by_value: dict[str, Explanation] = {cause.value: cause for kind in (TextCause, Cause) for cause in kind}
    return [by_value[value] for value in values if value in by_value]


def _pattern(result: TextResult) -> Iterator[str]:
    """Yield what the number of wrong tokens tells, where it tells something."""
    if result.tokens < _LEAST_OF_A_PATTERN:
        return
    if result.unlikely <= max(1, result.tokens // 20):
        yield (
            f"{counted(result.unlikely, 'token')} of {result.tokens} wrong, and all others right: drafts that were not "
            "verified, or a token that was forced?"
        )
    elif result.unlikely >= result.tokens // 4:
        yield (
            f"{result.unlikely} of {result.tokens} tokens are not the most likely ones: if it was sampled, say how by "
            "--sampling, or give log probabilities"
        )


_LEAST_OF_A_PATTERN = 20
"""Tokens of a text from which on the number of wrong ones tells something."""


def _token_words(text: str, token_id: int) -> str:
    return f"{text!r} (id {token_id})" if text else f"id {token_id}"


def _rounded(count: int) -> int:
    """Return a count with its first two digits."""
    step = int(10 ** max(0, len(str(count)) - 2))
    return -(-count // step) * step
