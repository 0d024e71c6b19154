"""Texts of docstrings and helps as Markdown that a forge and the site show alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_CODE = re.compile(r"(`+[^`]+`+)")
_SPECIAL = re.compile(r"([\\*<>$\[\]])")
_ROLE = re.compile(r":(?:math|class|func):(`)")


def prose(text: str) -> str:
    """Return a text whose characters mean nothing to Markdown, apart from code in backquotes."""
    parts = _CODE.split(_ROLE.sub(r"\1", " ".join(text.split())).replace("``", "`"))
    return "".join(part if part.startswith("`") else _SPECIAL.sub(r"\\\1", part) for part in parts)


def code(text: str) -> str:
    """Return a text as code in a line."""
    return f"`{text}`"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        cells = [cell.replace("|", r"\|") for cell in row]
        yield f"| {' | '.join(cells)} |"


def fence(text: str, language: str = "text") -> Iterator[str]:
    """Yield a block of code."""
    yield f"```{language}"
    yield from text.rstrip().splitlines()
    yield "```"
