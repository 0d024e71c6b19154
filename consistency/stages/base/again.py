"""The stage `base` again, as a soak repeats it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from consistency.capture.names import split_name
from consistency.case import standard
from consistency.worker.context import Context
from consistency.worker.ledger import Again, Ledger


def base(context: Context, ledger: Ledger) -> Again:
    """Return what digests every tensor of the base again.

    A tensor that the adapter's method rewrote is compared as it was after that.
    """

    def again() -> Iterator[None]:
        for name, tensor in context.base.on_device():
            layer, part = split_name(name)
            if name in context.rewritten:
                part = f"{part}_after_adapter"
            ledger.see((standard.BASE, layer, part), tensor, expected=functools.partial(context.expected_base, name))
            yield

    return again
