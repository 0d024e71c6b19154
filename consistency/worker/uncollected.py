"""Import libraries without the garbage collector, which finds next to nothing there and takes a seventh of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while libraries are imported, nor visit afterwards what they left.

    torch, transformers and PEFT make a million objects that live as long as the process. The collector visits all of
    them a dozen times while there are more and more, and once again when the process ends.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
