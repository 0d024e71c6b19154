"""Run passes of a worker with the decisions of the track in place of its own, and compare both."""

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

    A pass is identified by a key; it follows the track as long as it has the operations of the track, in its order.

    Parameters
    ----------
    path : Path
        The published track.
    title : str
        Name of the products that this device may compute with, by which flips are allowed.

    Attributes
    ----------
    flips : list of Flip
        Decisions that the worker made otherwise.
    """

    def __init__(self, path: Path, model: torch.nn.Module, title: str) -> None:
        self.flips: list[Flip] = []
        self.places = Places(model)
        self._table, self._file = Table.of(path), ArrayFile(path)
        self._title = title
        self._followed: dict[str, int] = {}
        """Number of decisions that a pass has followed, by key."""
        self._strayed: set[str] = set()
        """Keys of the passes that had another operation than the track."""

    def watch(self, key: str) -> Watch:
        """Return a watch that replays a pass of the track from its start."""
        remaining = iter(self._table.passes.get(key, ()))
        self._followed[key] = 0
        self._strayed.discard(key)

        def follow(decision: Decision) -> torch.Tensor | None:
            settled = None if key in self._strayed else next(remaining, None)
            if settled is None or not is_same(settled.name, settled.decided, decision):
                self._strayed.add(key)
                return None
            self._followed[key] += 1
            on_track, own = self._file.read(settled.decided), plain(decision.decided).to("cpu")
            flip = compared(
                settled.name,
                self.places.now,
                self._file.read(settled.exact),
                settled.dim,
                own,
                on_track,
                float(settled.allowed.get(self._title, math.inf)),
            )
            if flip is not None:
                self.flips.append(flip)
            return on_track.to(decision.decided.device)

        return follow

    def watch_if_any(self, key: str) -> Watch | None:
        """Return the watch of a pass; None where the track decides nothing in it.

        Watching takes some 30 µs per operation.
        """
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
        return key not in self._strayed and self._followed.get(key, 0) == len(self._table.passes.get(key, ()))


@contextmanager
def deciding(watch: Watch | None, *, gradient: bool, places: Places | None = None) -> Iterator[None]:
    """Watch the decisions of a pass within a `with` block; None watches nothing.

    Parameters
    ----------
    gradient : bool
        Watch also the decisions that a gradient alone depends on.
    places : Places, optional
        Follows the modules of the model meanwhile.
    """
    if watch is None:
        yield
        return
    with places or nullcontext(), DecisionMode(watch, gradient=gradient):
        yield
