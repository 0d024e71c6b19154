"""Passes of a worker: which decisions it made, and the pass again with the decisions of the track in their place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from consistency.numerics.decision import Decision
from consistency.numerics.decisions import DecisionMode, Watch
from consistency.worker.decisions.array_file import ArrayFile
from consistency.worker.decisions.places import Places
from consistency.worker.decisions.track import Flip, Settled, Table, compared, digest_of, is_same, plain


class Made:
    """The digests of a worker's decisions, by pass and in order."""

    def __init__(self) -> None:
        self._digests: dict[str, list[str]] = {}

    def watch(self, key: str) -> Watch | None:
        """Return what records a pass from its start; None after passes in which the model decided nothing.

        Watching takes some 30 µs of processor time per operation.
        """
        nothing = len(self._digests.keys() - {key}) > 0 and not any(self._digests.values())
        found: list[str] = []
        self._digests[key] = found

        def record(decision: Decision) -> None:
            found.append(digest_of(decision.decided))

        return None if nothing else record

    def passes(self) -> list[str]:
        """Return the names of the passes."""
        return list(self._digests)

    def is_on(self, table: Table, key: str) -> bool:
        """Return whether a pass made the decisions of the reference."""
        return self._digests[key] == [settled.digest for settled in table.passes.get(key, ())]


class Replay:
    """Passes with the decisions of the track in place of the worker's own, which are compared with them.

    Attributes
    ----------
    flips : list of Flip
        Where the worker decided otherwise.
    """

    def __init__(self, path: Path, model: torch.nn.Module, title: str) -> None:
        self.flips: list[Flip] = []
        self.places = Places(model)
        self._table, self._file = Table.of(path), ArrayFile(path)
        self._title = title
        self._left: dict[str, Iterator[Settled]] = {}
        self._lost: set[str] = set()

    def watch(self, key: str) -> Watch:
        """Return what replays a pass of the track from its start."""
        left = iter(self._table.passes.get(key, ()))
        self._left[key] = left
        self._lost.discard(key)

        def follow(decision: Decision) -> torch.Tensor | None:
            settled = None if key in self._lost else next(left, None)
            if settled is None or not is_same(settled.name, settled.decided, decision):
                self._lost.add(key)
                return None
            wanted, own = self._file.read(settled.decided), plain(decision.decided).to("cpu")
            flip = compared(
                settled.name, self.places.now, self._file.read(settled.exact), settled.dim, own, wanted,
                float(settled.allowed.get(self._title, math.inf)),
            )  # fmt: skip
            if flip is not None:
                self.flips.append(flip)
            return wanted.to(decision.decided.device)

        return follow

    def watch_if_any(self, key: str) -> Watch | None:
        """Return the same; None where the track decides nothing: watching takes some 30 µs per operation."""
        return self.watch(key) if self._table.passes.get(key) else None

    def was_complete(self, key: str) -> bool:
        """Report whether a pass had the operations of the track, in its order."""
        return key not in self._lost and next(self._left.get(key, iter(())), None) is None


@contextmanager
def deciding(watch: Watch | None, *, gradient: bool, places: Places | None = None) -> Iterator[None]:
    """Watch the decisions of a pass."""
    if watch is None:
        yield
        return
    with places or nullcontext(), DecisionMode(watch, gradient=gradient):
        yield
