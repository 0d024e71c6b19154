"""`docs/glossary.md`: every word of a report, as `consistency explain` says it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.reference_pages.markdown import fence, prose
from consistency.cli.glossary import GlossaryEntry, glossary

_HEAD = """# Glossary

Every word that a report shows: what it means, what causes it, and what to do. `consistency explain zeros` prints an
entry of this page, `consistency explain` lists all words.
"""


def page() -> str:
    """Return the page."""
    lines = [_HEAD]
    for family, members in itertools.groupby(glossary(), key=lambda entry: entry.family):
        lines += [f"## {family.title[0].upper()}{family.title[1:]}", ""]
        for entry in members:
            lines += _entry(entry)
    return "\n".join(lines)


def _entry(entry: GlossaryEntry) -> Iterator[str]:
    yield f"### `{entry.word}`"
    yield ""
    yield f"*{prose(entry.summary)}*"
    yield ""
    yield prose(entry.meaning)
    yield ""
    yield f"* **Cause.** {prose(entry.cause)}"
    yield f"* **What to do.** {prose(entry.action)}"
    yield ""
    yield from fence(entry.example)
    yield ""
