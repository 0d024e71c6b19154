"""Planted faults: what the tool claims to detect, put into one worker's real loading path on purpose.

A fault replaces a function that the worker is going to call with one that goes wrong as hardware or a library would;
everything after it is the real code. Nothing here is imported unless a job asks for a fault, which no option does: the
tests do, and so does whoever wants to see the tool find something.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from consistency.errors import UsageError
from consistency.worker.faults import (
    adapter,
    base,
    compute,
    computed,
    load_paths,
    memory,
    process,
    sharding,
    transfer,
    wrapping,
)
from consistency.worker.faults.planting import Install

FAULTS: dict[str, Install] = {
    **adapter.FAULTS,
    **base.FAULTS,
    **compute.FAULTS,
    **computed.FAULTS,
    **memory.FAULTS,
    **process.FAULTS,
    **load_paths.FAULTS,
    **sharding.FAULTS,
    **transfer.FAULTS,
    **wrapping.FAULTS,
}
"""Every fault by its name."""


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Plant a fault in this process, and take it away at the end.

    Raises
    ------
    UsageError
        There is no such fault.
    """
    if name not in FAULTS:
        raise UsageError(f"no such fault: {name}", wanted=", ".join(sorted(FAULTS)))
    undo = FAULTS[name]()
    try:
        yield
    finally:
        undo()
