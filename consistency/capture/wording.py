"""Write counts, lists and sizes in the sentences of captures, findings and reports."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Sequence

MOST_NAMES = 6


def counted(number: int, what: str) -> str:
    """Write a number with its noun: `1 tensor`, `2 tensors`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def listed(texts: Sequence[str]) -> str:
    """Join texts as in a sentence: `a, b and c`."""
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def and_more(left_out: int, what: str = "") -> str:
    """Write how many items are left out: `and 1 more finding`, `and 3 more`; nothing where none is."""
    if left_out <= 0:
        return ""
    if not what:
        return f"and {left_out} more"
    return f"and {counted(left_out, f'more {what}')}"


def shortened(names: Sequence[str], most: int = MOST_NAMES) -> list[str]:
    """Return all names where they are at most `most`, else the first ones and `and 3 more`."""
    if len(names) <= most:
        return list(names)
    return [*names[: most - 1], and_more(len(names) - most + 1)]


def some(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Join names, each once and at most `most` of them: `a, b, c`, or `a, b and 3 more`."""
    names = tuple(dict.fromkeys(names))
    texts = shortened(names, most)
    if len(names) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[:-1])} {texts[-1]}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Write whole numbers as ranges: `0-3, 7`."""
    ordered = sorted(set(numbers))
    ranges = []
    # numbers that follow each other have the same distance to their index
    for _, pairs in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(ranges)


def layers_text(names: Iterable[str], most: int = 8) -> str:
    """Write layers by their last part and the numbers of their blocks: `o_proj, q_proj in layers 0-3, 7`."""
    names = list(names)
    kinds = some([name.rpartition(".")[2] for name in names], most)
    blocks = []
    for name in names:
        blocks += [int(component) for component in name.split(".") if component.isdigit()][:1]
    numbers = numbers_text(blocks)
    if not numbers:
        return kinds
    noun = "layer" if numbers.isdigit() else "layers"
    return f"{kinds} in {noun} {numbers}"


def size(count: int) -> str:
    """Write a number of bytes: `512 B`, `1.5 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def time_of(text: str) -> datetime.datetime | None:
    """Return a time that a file states, in UTC; one without a zone is taken as UTC. None where the text is no time."""
    try:
        time = datetime.datetime.fromisoformat(text)
        return time.replace(tzinfo=time.tzinfo or datetime.UTC).astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return None


def when(at: str) -> str:
    """Write the time of a run, which is UTC, to the second: `2026-11-22 02:00:00 UTC`."""
    return f"{at[:19].replace('T', ' ')} UTC"
