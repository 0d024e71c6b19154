"""The words of this tool: what each means, what causes it, what to do, and an example. No torch here.

`consistency explain` prints them and `docs/glossary.md` is made of them. Each module explains the members of enums and
types that other packages have, and says nothing that these say already. It stands beside the commands because exit
statuses are words too; a module whose words were deleted is left out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

from consistency.cli.glossary.entry import Family as Family
from consistency.cli.glossary.entry import GlossaryEntry as GlossaryEntry
from consistency.errors import UsageError, did_you_mean
from consistency.optional import is_there

_MODULES = ("words", "kinds", "engine_mistakes", "outcomes", "checks", "history_changes", "exit_statuses")


@functools.cache
def glossary() -> tuple[GlossaryEntry, ...]:
    """Return every entry, by family."""
    modules = [f"{__name__}.{name}" for name in _MODULES]
    return tuple(entry for module in modules if is_there(module) for entry in importlib.import_module(module).entries())


def known_words() -> list[str]:
    """Return every word, each once: one may be in several families."""
    return list(dict.fromkeys(entry.word for entry in glossary()))


def explained(word: str) -> Sequence[GlossaryEntry]:
    """Return the entries of a word, one per family that has it.

    Raises
    ------
    UsageError
        No family has it.
    """
    form = word.strip().lower().replace("_", "-")
    found = [entry for entry in glossary() if entry.word == form]
    if not found:
        hint = did_you_mean(word, known_words()) or "`consistency explain` lists all words"
        raise UsageError("no such word", where="WORD", got=word, wanted="a word of a report", hint=hint)
    return found
