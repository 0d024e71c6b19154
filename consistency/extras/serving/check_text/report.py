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
    """A token that is not the largest.

    Attributes
    ----------
    token : int
        Its place in the text, from 1 on.
    id, largest_id : int
        Of the token, and of the one with the largest exact logit.
    text, largest_text : str
        The two in words, where the base has a tokenizer.
    gap, allowed : float
        Between their exact logits, and what rounding may do to it.
    """

    token: int
    id: int
    largest_id: int
    gap: float
    allowed: float
    text: str = ""
    largest_text: str = ""

    def sentence(self) -> str:
        """Return what it is, without a verdict."""
        words = [
            f"{text!r} (id {one})" if text else f"id {one}"
            for text, one in ((self.text, self.id), (self.largest_text, self.largest_id))
        ]
        return (
            f"{words[0]} at token {self.token} is {self.gap:.3g} below {words[1]}, of which rounding explains "
            f"{self.allowed:.2g}"
        )


class LogprobGap(msgspec.Struct, frozen=True, kw_only=True):
    """A log probability that is not the model's.

    Attributes
    ----------
    token : int
        Its place in the text, from 1 on.
    given, exact, allowed : float
        As it came with the text, as it follows from the exact logits, and what rounding may do to it.
    """

    token: int
    given: float
    exact: float
    allowed: float

    def sentence(self) -> str:
        """Return what it is, without a verdict."""
        side = "above" if self.given > self.exact else "below"
        return (
            f"that of token {self.token}, {self.given:.3g}, is {abs(self.given - self.exact):.2g} {side} the model's, "
            f"of which rounding explains {self.allowed:.2g}"
        )


class TextResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One text.

    Attributes
    ----------
    tokens, largest, tied : int
        All, those with the largest exact logit, and those that rounding may put above it.
    verdict : str
        Of the tokens: `possible` if each is the most likely one but for rounding; `sampled` if not, and the log
        probabilities are taken from the model's logits; `impossible`; `undecided` where a router may have chosen
        otherwise.
    worst : TokenGap or None
        The first token that is impossible, else the tied one with the largest gap over what is allowed.
    logprobs : float or None
        The largest error of the given log probabilities over what rounding may do; over 1 they are not the model's.
    logprobs_of : str
        How they were taken from its logits then, where it is known: `temperature 0.7`, `the end of the text masked`.
    worst_logprob : LogprobGap or None
        The one with that error, where it is over 1.
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
        """Report whether something is wrong of which the text itself does not tell the cause."""
        return self.verdict in ("impossible", "undecided") or (self.has_other_logprobs and not self.logprobs_of)

    @property
    def unlikely(self) -> int:
        """Return how many tokens are not the most likely ones, whatever rounding does."""
        return self.tokens - self.largest - self.tied


class TextReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found of all texts.

    Attributes
    ----------
    dtype : str
        In which they are said to be written.
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
        verdicts = {one.verdict for one in self.texts}
        if "impossible" in verdicts or self._with_other_logprobs():
            return "inconsistent"
        return "incomplete" if "undecided" in verdicts else "consistent"

    def _with_other_logprobs(self) -> list[TextResult]:
        """Return the texts of which nothing but the log probabilities is wrong."""
        return [one for one in self.texts if one.has_other_logprobs and one.verdict in ("possible", "sampled")]

    @property
    def exit_status(self) -> int:
        """Return 0, 1 or 3."""
        return {"consistent": 0, "inconsistent": 1, "incomplete": 3}[self.verdict]

    def to_builtins(self) -> dict[str, Any]:
        """Return it as JSON has it, with the verdict."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": self.schema, "verdict": self.verdict, **found}

    def lines(self) -> Iterator[str]:
        """Yield what to print."""
        yield self._headline()
        for number, one in enumerate(self.texts, 1):
            for sentence in self._sentences(one):
                yield f"text {number}: {sentence}"
        causes = [cause for cause in Cause if cause.value in (self.causes or self.logprob_causes)]
        if causes:
            phrases = " or ".join(cause.phrase.replace("{}", "some layers") for cause in causes)
            yield f"written {phrases}" if self.causes else f"the log probabilities were computed {phrases}"
            yield f"next: {causes[0].todo}"
        elif self.base_alone:
            yield "the base alone could have written all of it too: the text does not tell whether the adapter is on"

    def _headline(self) -> str:
        every = counted(len(self.texts), "text")
        impossible = [one for one in self.texts if one.verdict == "impossible"]
        others = self._with_other_logprobs()
        if impossible:
            # tokens that are not the most likely ones may have been sampled, where no mistake is known to write them
            may_be_sampled = not self.causes and all(one.has_other_logprobs for one in impossible)
            said = f"the model could not have written {len(impossible)} of {every}"
            if may_be_sampled:
                said = f"neither the tokens of {len(impossible)} of {every} are the most likely ones, nor the log "
                said += "probabilities the model's"
            return f"INCONSISTENT   {said}"
        if others:
            tokens = "it could have written the tokens"
            if any(one.verdict == "sampled" for one in others):
                tokens = "the tokens are not the most likely ones: sampled?"
            return f"INCONSISTENT   the log probabilities of {len(others)} of {every} are not the model's; {tokens}"
        undecided = sum(one.verdict == "undecided" for one in self.texts)
        if undecided:
            return f"INCOMPLETE   {undecided} of {every} not judged"
        tokens_of_all, tied, unlikely = (sum(getattr(one, name) for one in self.texts) for name in _COUNTED)
        kinds = f"{tied} of them nearly tied with the largest"
        if unlikely:
            kinds = f"{unlikely} of them not the most likely ones: sampled, with the model's log probabilities"
        written = f"the model could have written {_texts(len(self.texts))}"
        return f"CONSISTENT   {written}: {counted(tokens_of_all, 'token')}, {kinds}"

    def _sentences(self, one: TextResult) -> Iterator[str]:
        """Yield what is said of one text."""
        if one.reason:
            yield one.reason
        else:
            if one.verdict == "impossible" and one.worst is not None:
                yield one.worst.sentence()
            if one.worst_logprob is not None and not self.causes:
                yield self._of_logprobs(one, one.worst_logprob)
        if one.past_end:
            yield f"goes on where the model would have ended it, at {counted(one.past_end, 'token')}"

    def _of_logprobs(self, one: TextResult, worst: LogprobGap) -> str:
        if one.logprobs_of:
            return f"its log probabilities were taken with {one.logprobs_of}: {worst.sentence()}"
        said = f"its log probabilities are not the model's: {worst.sentence()}"
        if one.verdict == "impossible" or self.logprob_causes:
            return said
        return f"{said}; taken after temperature, top-k, top-p or a mask?"


_COUNTED = ("tokens", "tied", "unlikely")


def _texts(count: int) -> str:
    return "the text" if count == 1 else f"all {count} texts"
