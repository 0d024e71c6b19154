"""The result of `check-text`: each text with its gaps in tokens and log probabilities. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from consistency.capture.wording import counted
from consistency.extras.serving.causes import Cause

SCHEMA = "consistency.text/2"

Verdict = Literal["possible", "sampled", "impossible", "undecided"]


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
        log probabilities are taken from the model's logits; `impossible`; `undecided` where a router may have chosen
        otherwise.
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
    reason : str
        Why it is undecided.
    """

    tokens: int
    largest: int
    tied: int
    verdict: Verdict
    worst: TokenGap | None = None
    logprobs: float | None = None
    logprobs_of: str = ""
    worst_logprob: LogprobGap | None = None
    past_end: int = 0
    reason: str = ""

    @property
    def has_other_logprobs(self) -> bool:
        """Report whether log probabilities came with the text that are not the model's."""
        return self.worst_logprob is not None

    @property
    def is_unexplained(self) -> bool:
        """Report whether something is wrong, and the text itself does not tell the cause."""
        return self.verdict in ("impossible", "undecided") or (self.has_other_logprobs and not self.logprobs_of)

    @property
    def unlikely(self) -> int:
        """Return how many tokens are not the most likely ones, whatever rounding does."""
        return self.tokens - self.largest - self.tied


class TextReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The results of all texts, and the mistakes that explain them.

    Attributes
    ----------
    dtype : str
        The dtype that the writer is said to have used.
    texts : tuple of TextResult
        In the order of the file.
    causes : tuple of str
        Kinds of mistakes, each of which would have written every impossible text.
    logprob_causes : tuple of str
        Kinds of mistakes, each of which would have given every log probability that is not the model's.
    base_alone : bool
        The base without the adapter could have written all of them too, so they do not tell whether it was applied.
    """

    dtype: str
    texts: tuple[TextResult, ...]
    causes: tuple[str, ...] = ()
    logprob_causes: tuple[str, ...] = ()
    base_alone: bool = False
    schema: str = SCHEMA

    @property
    def verdict(self) -> str:
        """Return `consistent`, `inconsistent`, or `incomplete` where a text is undecided and nothing else is wrong.

        Log probabilities that are not the model's are inconsistent, though it could have written the tokens: who trains
        on them is misled.
        """
        verdicts = {result.verdict for result in self.texts}
        if "impossible" in verdicts or self._with_other_logprobs():
            return "inconsistent"
        return "incomplete" if "undecided" in verdicts else "consistent"

    def _with_other_logprobs(self) -> list[TextResult]:
        """Return the texts in which the log probabilities alone are wrong."""
        results = [result for result in self.texts if result.verdict in ("possible", "sampled")]
        return [result for result in results if result.has_other_logprobs]

    @property
    def exit_status(self) -> int:
        """Return 0, 1 or 3."""
        return {"consistent": 0, "inconsistent": 1, "incomplete": 3}[self.verdict]

    def to_builtins(self) -> dict[str, Any]:
        """Return the report as JSON has it, with the verdict."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": self.schema, "verdict": self.verdict, **fields}

    def lines(self) -> Iterator[str]:
        """Yield the lines to print: the verdict, what is wrong in each text, and the cause with what to do next."""
        yield self._headline()
        for number, result in enumerate(self.texts, 1):
            for sentence in self._sentences(result):
                yield f"text {number}: {sentence}"
        causes = [cause for cause in Cause if cause.value in (self.causes or self.logprob_causes)]
        if causes:
            phrases = " or ".join(cause.phrase.replace("{}", "some layers") for cause in causes)
            if self.causes:
                yield f"written {phrases}"
            else:
                yield f"the log probabilities were computed {phrases}"
            yield f"next: {causes[0].todo}"
        elif self.base_alone:
            yield "the base alone could have written all of it too: the text does not tell whether the adapter is on"

    def _headline(self) -> str:
        count = counted(len(self.texts), "text")
        impossible = [result for result in self.texts if result.verdict == "impossible"]
        if impossible:
            return f"INCONSISTENT   {self._sentence_of_impossible(impossible, count)}"
        with_other_logprobs = self._with_other_logprobs()
        if with_other_logprobs:
            tokens = "it could have written the tokens"
            if any(result.verdict == "sampled" for result in with_other_logprobs):
                tokens = "the tokens are not the most likely ones: sampled?"
            logprobs = f"the log probabilities of {len(with_other_logprobs)} of {count} are not the model's"
            return f"INCONSISTENT   {logprobs}; {tokens}"
        undecided = sum(result.verdict == "undecided" for result in self.texts)
        if undecided:
            return f"INCOMPLETE   {undecided} of {count} not judged"
        return f"CONSISTENT   {self._sentence_of_possible()}"

    def _sentence_of_impossible(self, impossible: list[TextResult], count: str) -> str:
        # tokens that are not the most likely ones may have been sampled, where no mistake is known to write them
        may_be_sampled = not self.causes and all(result.has_other_logprobs for result in impossible)
        if not may_be_sampled:
            return f"the model could not have written {len(impossible)} of {count}"
        return (
            f"neither the tokens of {len(impossible)} of {count} are the most likely ones, nor the log "
            "probabilities the model's"
        )

    def _sentence_of_possible(self) -> str:
        texts = "the text" if len(self.texts) == 1 else f"all {len(self.texts)} texts"
        tokens = sum(result.tokens for result in self.texts)
        tied = sum(result.tied for result in self.texts)
        unlikely = sum(result.unlikely for result in self.texts)
        kinds = f"{tied} of them nearly tied with the largest"
        if unlikely:
            kinds = f"{unlikely} of them not the most likely ones: sampled, with the model's log probabilities"
        return f"the model could have written {texts}: {counted(tokens, 'token')}, {kinds}"

    def _sentences(self, result: TextResult) -> Iterator[str]:
        """Yield the sentences on one text: why it is not judged, or what is wrong with it."""
        if result.reason:
            yield result.reason
        else:
            if result.verdict == "impossible" and result.worst is not None:
                yield result.worst.sentence()
            # a cause of all texts explains their log probabilities too
            if result.worst_logprob is not None and not self.causes:
                yield self._sentence_of_logprobs(result, result.worst_logprob)
        if result.past_end:
            yield f"goes on where the model would have ended it, at {counted(result.past_end, 'token')}"

    def _sentence_of_logprobs(self, result: TextResult, worst: LogprobGap) -> str:
        if result.logprobs_of:
            return f"its log probabilities were taken with {result.logprobs_of}: {worst.sentence()}"
        sentence = f"its log probabilities are not the model's: {worst.sentence()}"
        if result.verdict == "impossible" or self.logprob_causes:
            return sentence
        return f"{sentence}; taken after temperature, top-k, top-p or a mask?"


def _token_words(text: str, token_id: int) -> str:
    return f"{text!r} (id {token_id})" if text else f"id {token_id}"
