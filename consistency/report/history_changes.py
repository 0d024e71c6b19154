"""Since when: the changes of a history, for people and programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console

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

_POINTS = frozenset({ChangeKind.SOFTWARE, ChangeKind.INPUTS, ChangeKind.NEW})


class ChangeRow(Change, frozen=True, kw_only=True):
    """A change, with the names of its workers as patterns (`gpu-[0001-0128]:cuda:[0-7]`)."""

    @classmethod
    def of(cls, change: Change) -> ChangeRow:
        return cls(**{**msgspec.structs.asdict(change), "workers": tuple(patterns(change.workers))})

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
    def cells(self) -> tuple[str, str, str, str]:
        """Return since when, until when, what, and which devices."""
        until = "" if self.kind in _POINTS else "now" if self.until is None else when(self.until)
        what = _WORDS[self.kind].format(self.detail) if self.detail else _WORDS[self.kind].partition(": ")[0]
        names = some(self.workers, _MOST_PATTERNS)
        return self.began, until, what, names if self.devices == 1 else f"{counted(self.devices, 'device')}: {names}"


def change_rows(history: History, last: int) -> list[ChangeRow]:
    """Return what changed over the last runs, or over all of them where `last` is 0: the latest change first."""
    names = history.names()
    return [ChangeRow.of(one) for one in changes(history.runs(list(reversed(names[:last] if last else names))))]


def print_changes(rows: Sequence[ChangeRow], console: Console) -> None:
    """Print one line per change."""
    with without_trailing_blanks(console):
        print_rows(console, ("since", "until", "change", "devices"), [plain_cells(*row.cells) for row in rows])
        console.print(f"\n{counted(len(rows), 'change')}")
