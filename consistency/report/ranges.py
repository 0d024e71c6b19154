"""Write many names as few patterns, and read them: `gpu[001-128]:cuda:[0-7]`, as Slurm writes lists of hosts.

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
"""Parts of a name, or of names that were joined: texts at even indices, numbers at odd ones, a text first and last.

`gpu[1-2]:x` is `[("gpu",), ("1", "2"), (":x",)]`: a text is always alone, numbers may be several.
"""


def written(names: Sequence[str]) -> list[str]:
    """Return names as a report has them: few as they are, many as patterns."""
    if len(names) > MOST_NAMED:
        return folded(names)
    return [name.replace("[", "[[]") for name in names]


def folded(names: Iterable[str]) -> list[str]:
    """Return patterns that stand for these names, in the same order."""
    parts_of_names: list[_Name] = [[(part,) for part in _NUMBER.split(name)] for name in names]
    longest = max(map(len, parts_of_names), default=1)
    # The last number first: `host-1:cuda:[0-7]`, then `host-[1-9]:cuda:[0-7]`.
    for index in range(longest - 2, 0, -2):
        parts_of_names = list(_joined_names(parts_of_names, index))
    return [_pattern(name) for name in parts_of_names]


def patterns(names: Iterable[str]) -> list[str]:
    """Return patterns that stand for these names, in their natural order: `gpu-2` is before `gpu-10`."""
    return folded(sorted(names, key=_natural_key))


def _natural_key(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(name)]


def unfolded(patterns: Iterable[str]) -> Iterator[str]:
    """Yield the names that patterns stand for; raise `ValueError` where they are too many."""
    count = 0
    for pattern in patterns:
        for name in _names(pattern):
            count += 1
            if count > MOST_NAMES:
                raise ValueError(f"more than {MOST_NAMES} names")
            yield name


def _joined_names(names: Sequence[_Name], index: int) -> Iterator[_Name]:
    """Join names that follow each other and differ in the number at an index alone."""
    last: _Name | None = None  # first of the names that are being joined
    last_surroundings: tuple[list[_Numbers], list[_Numbers]] | None = None
    numbers: list[str] = []  # of all names that are being joined
    for name in names:
        surroundings = (name[:index], name[index + 1 :])
        has_number = len(name) > index
        if last is not None and has_number and surroundings == last_surroundings:
            numbers += name[index]
            continue
        if last is not None:
            yield _with_numbers(last, index, numbers)
        last, last_surroundings = name, surroundings
        numbers = list(name[index]) if has_number else []
    if last is not None:
        yield _with_numbers(last, index, numbers)


def _with_numbers(name: _Name, index: int, numbers: Sequence[str]) -> _Name:
    """Return a name with these numbers at an index; as it is where there are none, because it is too short."""
    return [*name[:index], tuple(numbers), *name[index + 1 :]] if numbers else name


def _pattern(name: _Name) -> str:
    texts = []
    for index, part in enumerate(name):
        is_number = index % 2 == 1
        if is_number and len(part) > 1:
            texts.append(f"[{','.join(ranges(part))}]")
        else:
            texts.append(part[0].replace("[", "[[]"))
    return "".join(texts)


def ranges(numbers: Sequence[str]) -> Iterator[str]:
    """Yield numbers, and `first-last` where each is one more than the one before."""
    first = last = numbers[0]
    for number in (*numbers[1:], ""):  # the empty text ends the last range
        if number and number == _successor(last, len(first)):
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        first = last = number


def _successor(number: str, width: int) -> str:
    """Return the next number, in at least this many digits."""
    return f"{int(number) + 1:0{width}}"


def _names(pattern: str) -> Iterator[str]:
    """Yield the names that a pattern stands for, the last bracket running fastest."""
    choices = []
    for index, part in enumerate(_PART.split(pattern)):
        is_text = index % 2 == 0 or part == "["
        choices.append([part] if is_text else _numbers(part))
    return map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    """Return the numbers in a bracket, `1-3,7`; raise `ValueError` where they are too many."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if len(numbers) + len(span) > MOST_NAMES:
            raise ValueError(f"more than {MOST_NAMES} names")
        numbers += [f"{number:0{len(first)}}" for number in span]
    return numbers
