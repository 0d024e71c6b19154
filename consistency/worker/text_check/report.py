"""What was found of texts. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from consistency.capture.engine_causes import Cause
from consistency.capture.wording import counted

SCHEMA = "consistency.text/1"


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
        words = [f"{text!r} (id {one})" if text else f"id {one}" for text, one in
                 ((self.text, self.id), (self.largest_text, self.largest_id))]  # fmt: skip
        return (
            f"{words[0]} at token {self.token} is {self.gap:.3g} below {words[1]}, of which rounding explains "
            f"{self.allowed:.2g}"
        )


class TextResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One text.

    Attributes
    ----------
    tokens, largest, tied : int
        All, those with the largest exact logit, and those that rounding may put above it.
    verdict : str
        `possible`, `impossible`, or `undecided` where a router may have chosen otherwise.
    worst : TokenGap or None
        The first token that is impossible, else the tied one with the largest gap over what is allowed.
    logprobs : float or None
        The largest error of the given log probabilities over what rounding may do.
    past_end : int
        Tokens in whose place the model would have ended the text: they are judged among those that go on.
    reason : str
        Why it is undecided.
    """

    tokens: int
    largest: int
    tied: int
    verdict: Literal["possible", "impossible", "undecided"]
    worst: TokenGap | None = None
    logprobs: float | None = None
    past_end: int = 0
    reason: str = ""


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
    base_alone : bool
        The base without the adapter could have written all of them too, so they do not tell whether it was applied.
    """

    dtype: str
    texts: tuple[TextResult, ...]
    causes: tuple[str, ...] = ()
    base_alone: bool = False
    schema: str = SCHEMA

    @property
    def verdict(self) -> str:
        """Return `consistent`, `inconsistent`, or `incomplete` where a text is undecided and none is impossible."""
        found = {one.verdict for one in self.texts}
        return "inconsistent" if "impossible" in found else "incomplete" if "undecided" in found else "consistent"

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
        by_verdict = {name: [i for i, one in enumerate(self.texts, 1) if one.verdict == name]
                      for name in ("possible", "impossible", "undecided")}  # fmt: skip
        tokens, tied = (sum(getattr(one, name) for one in self.texts) for name in ("tokens", "tied"))
        yield {
            "consistent": f"CONSISTENT   the model could have written {_texts(len(self.texts))}: "
            f"{counted(tokens, 'token')}, {tied} of them nearly tied with the largest",
            "inconsistent": f"INCONSISTENT   the model could not have written {len(by_verdict['impossible'])} of "
            f"{counted(len(self.texts), 'text')}",
            "incomplete": f"INCOMPLETE   {len(by_verdict['undecided'])} of {counted(len(self.texts), 'text')} "
            "not judged",
        }[self.verdict]
        for number, one in enumerate(self.texts, 1):
            if one.reason:
                yield f"text {number}: {one.reason}"
            elif one.verdict == "impossible":
                is_token = one.worst is not None and one.worst.gap > one.worst.allowed
                yield f"text {number}: " + (
                    one.worst.sentence() if one.worst is not None and is_token
                    else f"its log probabilities are {one.logprobs:.3g} times as far off as rounding explains"
                )  # fmt: skip
            if one.past_end:
                yield f"text {number}: goes on where the model would have ended it, at {counted(one.past_end, 'token')}"
        if self.causes:
            causes = [cause for cause in Cause if cause.value in self.causes]
            phrases = " or ".join(cause.phrase.replace("{}", "some layers") for cause in causes)
            yield f"written {phrases}"
            yield f"next: {causes[0].todo}"
        elif self.base_alone:
            yield "the base alone could have written all of it too: the text does not tell whether the adapter is on"


def _texts(count: int) -> str:
    return "the text" if count == 1 else f"all {count} texts"
