"""Replace many names in many texts: as many as a fleet has hosts and devices, in every text of its report.

Trying each name on each text would take the product of both. A name that stands alone in a text, between characters
that are no letters and digits, has every word of it as a word of that text; so the names that a text may contain are
found by the rarest word of each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_WORD = re.compile(r"[A-Za-z0-9]+")


@dataclass(slots=True)
class Replacements:
    """Texts and what stands in their place, tried in this order.

    Attributes
    ----------
    before, after : str
        What a text must not follow, and not be followed by, as assertions of a regular expression. They exclude at
        least all letters and digits of ASCII.
    """

    of: Mapping[str, str]
    before: str
    after: str
    _by_word: dict[str, list[int]] = field(init=False)
    _always: list[int] = field(init=False)
    _texts: tuple[str, ...] = field(init=False)
    _may_begin: re.Pattern[str] = field(init=False)
    _may_end: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._texts = tuple(self.of)
        self._may_begin, self._may_end = re.compile(self.before), re.compile(self.after)
        words = [_WORD.findall(text) for text in self._texts]
        common = Counter(word for some in words for word in set(some))
        self._by_word, self._always = {}, []
        for place, some in enumerate(words):
            if some:
                self._by_word.setdefault(min(some, key=lambda word: common[word]), []).append(place)
            else:
                self._always.append(place)

    def __call__(self, text: str) -> str:
        """Return a text in which all of them are replaced."""
        for place in self._candidates(text):
            name = self._texts[place]
            if name in text:
                text = self._replaced(text, name, self.of[name])
        return text

    def _replaced(self, text: str, name: str, instead: str) -> str:
        """Return a text without one name: a regular expression of each would take longer to compile than to use."""
        parts, done, start = [], 0, text.find(name)
        while start >= 0:
            end = start + len(name)
            if self._may_begin.match(text, start) and self._may_end.match(text, end):
                parts += [text[done:start], instead]
                done = end
            else:
                end = start + 1
            start = text.find(name, end)
        return "".join([*parts, text[done:]])

    def _candidates(self, text: str) -> Iterable[int]:
        if not self._texts:
            return ()
        found = {place for word in _WORD.findall(text) for place in self._by_word.get(word, ())}
        return sorted({*found, *self._always})
