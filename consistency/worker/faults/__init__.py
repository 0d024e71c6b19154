"""Planted faults: what the tool claims to detect, put into one worker's real loading path on purpose.

A fault replaces a function that the worker is going to call with one that goes wrong as hardware or a library would;
everything after it is the real code. No option of a run plants one: the drill and the tests do. `catalogue` has a row
for each.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

from consistency.errors import UsageError


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Plant a fault in this process, and remove it at the end.

    Raises
    ------
    UsageError
        Unknown fault.
    """
    from consistency.worker.faults.catalogue import FAULTS  # which reads those of plug-ins, and they read this package

    if name not in FAULTS:
        raise UsageError(f"unknown fault: {name}", wanted=", ".join(sorted(FAULTS)))
    undo = pkgutil.resolve_name(FAULTS[name].plant)()
    try:
        yield
    finally:
        undo()
