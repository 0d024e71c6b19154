"""Planted faults of the copies that the stage `transfer` makes: dropped, zeros, a bit, old bytes under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from consistency.worker.faults.planting import Undo, instead, together
from consistency.worker.model.poison import INTEGERS

Copy = Callable[[torch.Tensor, torch.Tensor], None]

_copy = instead("consistency.stages.transfer.copying:copy")


@_copy
def dropped(_real: Copy, _source: torch.Tensor, _destination: torch.Tensor) -> None:
    """Return as if the copy had been made."""


@_copy
def zeros(_real: Copy, _source: torch.Tensor, destination: torch.Tensor) -> None:
    destination.zero_()


@_copy
def corrupt(real: Copy, source: torch.Tensor, destination: torch.Tensor) -> None:
    real(source, destination)
    element = destination[(0,) * destination.dim()]
    element.view(INTEGERS[element.element_size()]).bitwise_xor_(1 << 5)


def stale_under_load() -> Undo:
    """Deliver, under load, the bytes of an earlier copy of the same size."""
    is_loaded = False
    earlier: dict[int, torch.Tensor] = {}  # the source of the last copy without load, by its number of bytes

    @instead("consistency.stages.transfer.delivery:under_load")
    @contextmanager
    def under_load(real: Callable[..., Any], *args: Any) -> Iterator[None]:
        nonlocal is_loaded
        with real(*args):
            is_loaded = True
            try:
                yield
            finally:
                is_loaded = False

    @_copy
    def copy(real: Copy, source: torch.Tensor, destination: torch.Tensor) -> None:
        if is_loaded:
            real(earlier.get(source.nbytes, source), destination)
        else:
            earlier[source.nbytes] = source
            real(source, destination)

    return together(copy, under_load)()
