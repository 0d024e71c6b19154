"""What explains a finding: a word with what it says, and what to do. No torch here."""

from __future__ import annotations

import enum
from typing import Self


class Explanation(enum.StrEnum):
    """A word with what it says and what to do."""

    phrase: str
    """`{}` marks what it is about."""
    todo: str
    """What to do next."""

    def __new__(cls, word: str, phrase: str, todo: str) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.phrase = phrase
        member.todo = todo
        return member

    def sentence(self, about: str = "") -> str:
        """Return what it says of something."""
        return self.phrase.replace("{}", about)
