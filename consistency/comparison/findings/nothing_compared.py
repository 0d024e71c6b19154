"""Nothing was compared, or nothing of one capture with the others: a finding, because agreement cannot be claimed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import TensorRecord
from consistency.capture.wording import some
from consistency.case.stages import Stage
from consistency.comparison.coverage import coverage
from consistency.comparison.kinds import FindingKind
from consistency.comparison.records import Key, tables_of
from consistency.comparison.result import Finding, TensorComparison
from consistency.comparison.workers import ComparedWorker
from consistency.numerics.rules import Rule

_MOST_REASONS = 3
_MOST_CAPTURES = 4
_ABSENT = frozenset({"skipped", "blocked"})
_ALONE = "there is one worker, and neither a file nor an exact value to compare it with"


def find_nothing_compared(compared: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]) -> Iterable[Finding]:
    """Report a comparison without a compared tensor, and captures that have none in common with any other.

    Lost workers are a finding already.
    """
    whole = [p for p in compared if p.info.status == "ok"]
    if len(whole) < len(compared) and not whole:
        return
    if tensors and not coverage(tensors):
        reasons = dict.fromkeys(row.reason or _ALONE for tensor in tensors for row in tensor.outcomes)
        yield Finding(
            kind=FindingKind.NOTHING_COMPARED,
            severity="error",
            message=f"nothing was compared: {'; '.join(list(reasons)[:_MOST_REASONS])}",
            workers=tuple(dict.fromkeys(p.label for p in compared)),
            next="choose other --stages, or give another device to compare with",
        )
        return
    by_capture: dict[int, list[ComparedWorker]] = {}
    for p in whole:
        by_capture.setdefault(id(p.capture), []).append(p)
    comparable = _Comparable()
    keys = [comparable.of(members) for members in by_capture.values()]
    of_captures = Counter(keys)  # most captures of a fleet have the same
    count: Counter[Key] = Counter()
    for found, captures in of_captures.items():
        for key in found:
            count[key] += captures
    apart = [
        (members, found)
        for members, found in zip(by_capture.values(), keys, strict=True)
        if len(keys) > 1 and all(count[key] == 1 for key in found)
    ]
    if apart and len(apart) == len(keys):
        texts = [f"{_names(members)} {_stages(found)}" for members, found in apart]
        yield _finding(
            f"the {len(keys)} captures have no tensor in common: {some(texts, _MOST_CAPTURES)}",
            [p for members, _ in apart for p in members],
        )
        return
    for members, found in apart:
        verb = "has" if len(members) == 1 else "have"
        message = f"{_names(members)} {verb} no tensor in common with the other captures: {_stages(found)}"
        yield _finding(message, members)


def _finding(message: str, workers: Iterable[ComparedWorker]) -> Finding:
    return Finding(
        kind=FindingKind.NOTHING_COMPARED, severity="error", message=message,
        workers=tuple(dict.fromkeys(p.label for p in workers)),
        next="capture again with the base, the adapter and the --stages of the others",
    )  # fmt: skip


def _names(workers: Iterable[ComparedWorker]) -> str:
    return some([p.label for p in workers])


def _stages(keys: Iterable[Key]) -> str:
    return f"({some(sorted({key[0] for key in keys})) or 'no stage'})"


class _Comparable:
    """What of captures could be compared with another one, found once for all workers that share a table."""

    def __init__(self) -> None:
        self._same: dict[frozenset[Key], frozenset[Key]] = {}
        self._tables: dict[int, frozenset[Key]] = {}
        self._joined: dict[frozenset[frozenset[Key]], frozenset[Key]] = {}

    def of(self, workers: Iterable[ComparedWorker]) -> frozenset[Key]:
        """Return the tensors of a capture that another one may have; equal ones are one object."""
        parts = frozenset(map(self._table, tables_of(worker.records for worker in workers)))
        if parts not in self._joined:
            found = frozenset().union(*parts)
            self._joined[parts] = self._same.setdefault(found, found)
        return self._joined[parts]

    def _table(self, table: Mapping[Key, TensorRecord]) -> frozenset[Key]:
        if id(table) not in self._tables:
            found = frozenset(_keys(table))
            self._tables[id(table)] = self._same.setdefault(found, found)
        return self._tables[id(table)]


def _keys(table: Mapping[Key, TensorRecord]) -> Iterator[Key]:
    """Yield what could be compared with another capture.

    Facts and copies between devices have other names on every host: of these it is the stage.
    """
    for key, record in table.items():
        if record.status not in _ABSENT and key[1] != WHOLE_MODEL:
            own = record.rule == Rule.LIMIT or key[0] == Stage.TRANSFER
            yield (key[0], "", "") if own else key
