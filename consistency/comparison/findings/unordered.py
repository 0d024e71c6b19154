"""Tensors that an operation without a deterministic version can reach: their bits may be others each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from consistency.capture.wording import listed
from consistency.comparison.records import Key
from consistency.comparison.workers import ComparedWorker


def without_version(operations: Iterable[str]) -> str:
    """Return the clause that excuses a bitwise difference by these operations."""
    return f": torch has no deterministic version of {listed(list(operations))}, which ran before"


def ran_before(itself: Sequence[ComparedWorker], load_path: str, key: Key) -> tuple[str, ...]:
    """Return the operations without a deterministic version that ran before a device recorded a tensor.

    Parameters
    ----------
    itself : sequence of ComparedWorker
        The workers of the device; the reference worker stands on load paths that it did not take, as its first one.
    """
    views = (view for worker in itself if (view := worker.on(load_path)) is not None)
    record = next(views, itself[0]).records.get(key)
    return () if record is None else record.nondeterministic
