"""Passes of a worker with the decisions of the track in place of its own, which are compared with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from consistency.numerics.decision import Decision
from consistency.numerics.decisions import DecisionMode, Watch
from consistency.worker.decisions.array_file import ArrayFile
from consistency.worker.decisions.track import Flip, Places, Table, compared, is_same, plain


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
        self._followed: dict[str, int] = {}
        self._lost: set[str] = set()

    def watch(self, key: str) -> Watch:
        """Return what replays a pass of the track from its start."""
        left = iter(self._table.passes.get(key, ()))
        self._followed[key] = 0
        self._lost.discard(key)

        def follow(decision: Decision) -> torch.Tensor | None:
            settled = None if key in self._lost else next(left, None)
            if settled is None or not is_same(settled.name, settled.decided, decision):
                self._lost.add(key)
                return None
            self._followed[key] += 1
            wanted, own = self._file.read(settled.decided), plain(decision.decided).to("cpu")
            flip = compared(
                settled.name,
                self.places.now,
                self._file.read(settled.exact),
                settled.dim,
                own,
                wanted,
                float(settled.allowed.get(self._title, math.inf)),
            )
            if flip is not None:
                self.flips.append(flip)
            return wanted.to(decision.decided.device)

        return follow

    def watch_if_any(self, key: str) -> Watch | None:
        """Return the same; None where the track decides nothing: watching takes some 30 µs per operation."""
        return self.watch(key) if self._table.passes.get(key) else None

    @property
    def decides(self) -> bool:
        """Whether the track decides anything."""
        return any(self._table.passes.values())

    def is_complete(self) -> bool:
        """Report whether all passes had the operations of the track, in its order."""
        return all(map(self.was_complete, self._table.passes))

    def was_complete(self, key: str) -> bool:
        """Report whether a pass had the operations of the track, in its order."""
        return key not in self._lost and self._followed.get(key, 0) == len(self._table.passes.get(key, ()))


@contextmanager
def deciding(watch: Watch | None, *, gradient: bool, places: Places | None = None) -> Iterator[None]:
    """Watch the decisions of a pass."""
    if watch is None:
        yield
        return
    with places or nullcontext(), DecisionMode(watch, gradient=gradient):
        yield
