"""Many names as few patterns: `gpu[001-128]:cuda:[0-7]`, as Slurm writes lists of hosts.

A pattern stands for its names in order, the last bracket running fastest. In brackets are numbers and ranges of them;
those that begin with a zero keep their width. A `[` that belongs to a name is written `[[]`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

MOST_NAMES = 1_000_000
"""Names that a stranger's report may stand for: a hundred fleets of ten thousand devices."""

MOST_NAMED = 16
"""Names that a list has before they are folded: a host with two load paths for each of eight devices."""

_NUMBER = re.compile(r"([0-9]+)")
_PART = re.compile(r"\[(\[|[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)\]")

_Numbers = tuple[str, ...]
_Name = list[_Numbers]
"""Texts and numbers in turn, a text first and last; each text is alone, and of numbers there may be several."""


def written(names: Sequence[str]) -> list[str]:
    """Return names as a report has them: few as they are, many as patterns."""
    return folded(names) if len(names) > MOST_NAMED else [name.replace("[", "[[]") for name in names]


def folded(names: Iterable[str]) -> list[str]:
    """Return patterns that stand for these names, in the same order."""
    found: list[_Name] = [[(part,) for part in _NUMBER.split(name)] for name in names]
    longest = max(map(len, found), default=1)
    for place in range(longest - 2, 0, -2):  # the last number first: `host-1:cuda:[0-7]`, then `host-[1-9]:cuda:[0-7]`
        found = list(_merged(found, place))
    return [_pattern(name) for name in found]


def patterns(names: Iterable[str]) -> list[str]:
    """Return patterns that stand for these names, in their natural order."""
    return folded(sorted(names, key=lambda name: [int(p) if p.isdigit() else p for p in _NUMBER.split(name)]))


def unfolded(patterns: Iterable[str]) -> Iterator[str]:
    """Yield the names that patterns stand for; raise `ValueError` where they are too many."""
    count = 0
    for pattern in patterns:
        for name in _names(pattern):
            count += 1
            if count > MOST_NAMES:
                raise ValueError(f"more than {MOST_NAMES} names")
            yield name


def _merged(names: Sequence[_Name], place: int) -> Iterator[_Name]:
    """Join names that follow each other and differ in one number alone."""
    last: _Name | None = None
    rest: tuple[list[_Numbers], list[_Numbers]] | None = None
    values: list[str] = []
    for name in names:
        around = (name[:place], name[place + 1 :])
        if last is not None and len(name) > place and around == rest:
            values += name[place]
            continue
        if last is not None:
            yield [*last[:place], tuple(values), *last[place + 1 :]] if values else last
        last, rest, values = name, around, list(name[place]) if len(name) > place else []
    if last is not None:
        yield [*last[:place], tuple(values), *last[place + 1 :]] if values else last


def _pattern(name: _Name) -> str:
    texts = []
    for place, part in enumerate(name):
        if place % 2 and len(part) > 1:
            texts.append(f"[{','.join(ranges(part))}]")
        else:
            texts.append(part[0].replace("[", "[[]"))
    return "".join(texts)


def ranges(numbers: Sequence[str]) -> Iterator[str]:
    """Yield numbers, and `first-last` where each is one more than the one before."""
    first = last = numbers[0]
    for number in (*numbers[1:], ""):
        if number and number == _next(last, len(first)):
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        first = last = number


def _next(number: str, width: int) -> str:
    return f"{int(number) + 1:0{width}}"


def _names(pattern: str) -> Iterator[str]:
    parts = _PART.split(pattern)
    choices = [[part] if place % 2 == 0 or part == "[" else _numbers(part) for place, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if len(found) + len(span) > MOST_NAMES:
            raise ValueError(f"more than {MOST_NAMES} names")
        found += [f"{number:0{len(first)}}" for number in span]
    return found
