"""Since when: the changes of a history, for people and programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from consistency.capture.wording import counted, some, when
from consistency.comparison.history.changes import Change, ChangeKind, changes
from consistency.comparison.history.store import History
from consistency.report.console import plain_cells, print_rows, without_trailing_blanks
from consistency.report.history_classes import patterns

_MOST_PATTERNS = 4

_WORDS = {
    ChangeKind.DRIFT: "drift in {}",
    ChangeKind.SOFTWARE: "other software or settings: {}",
    ChangeKind.INPUTS: "other inputs",
    ChangeKind.LOST: "worker lost",
    ChangeKind.INCONSISTENT: "inconsistent",
    ChangeKind.GONE: "missing",
    ChangeKind.NEW: "new",
}


class ChangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A change, with the names of its workers as patterns (`gpu-[0001-0128]:cuda:[0-7]`)."""

    kind: ChangeKind
    since: str
    before: str | None
    until: str | None
    detail: str
    devices: int
    workers: tuple[str, ...]

    @classmethod
    def of(cls, change: Change) -> ChangeRow:
        fields = {name: getattr(change, name) for name in change.__struct_fields__}
        return cls(**{**fields, "workers": tuple(patterns(change.workers))})

    @property
    def began(self) -> str:
        return when(self.since) + (" or earlier" if self.before is None else "")

    @property
    def when(self) -> str:
        """Return the time in words."""
        if self.until is not None:
            return f"{self.began} until {when(self.until)}"
        return self.began if self.kind in _POINTS else f"since {self.began}"

    @property
    def what(self) -> str:
        text = _WORDS[self.kind]
        return text.format(self.detail) if self.detail else text.partition(": ")[0]

    @property
    def which(self) -> str:
        names = some(self.workers, _MOST_PATTERNS)
        return names if self.devices == 1 else f"{counted(self.devices, 'device')}: {names}"


_POINTS = frozenset({ChangeKind.SOFTWARE, ChangeKind.INPUTS, ChangeKind.NEW})


def change_rows(history: History, last: int) -> list[ChangeRow]:
    """Return what changed over the last runs, or over all of them where `last` is 0: the latest change first."""
    names = history.names()
    runs = history.runs(list(reversed(names[:last] if last else names)))
    return [ChangeRow.of(change) for change in changes(runs)]


def print_changes(rows: Sequence[ChangeRow], console: Console) -> None:
    """Print one line per change."""
    with without_trailing_blanks(console):
        print_rows(console, ("since", "until", "change", "devices"), list(_cells(rows)))
        console.print(f"\n{counted(len(rows), 'change')}")


def _cells(rows: Iterable[ChangeRow]) -> Iterator[Sequence[Text]]:
    for row in rows:
        until = "" if row.kind in _POINTS else "now" if row.until is None else when(row.until)
        yield plain_cells(row.began, until, row.what, row.which)
