"""The base of the words that explain a finding. No torch here."""

from __future__ import annotations

import enum
from typing import Self


class Explanation(enum.StrEnum):
    """A word with its sentence and its advice."""

    phrase: str
    """The sentence; `{}` marks the place of its subject."""
    todo: str
    """What the user should do next."""

    def __new__(cls, word: str, phrase: str, todo: str) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.phrase = phrase
        member.todo = todo
        return member

    def sentence(self, about: str = "") -> str:
        """Return the sentence about a subject."""
        return self.phrase.replace("{}", about)
