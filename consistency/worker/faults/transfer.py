"""Faults of the copies that the stage `transfer` makes: dropped, zeros, a bit, old bytes beside running work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, replace

Copy = Callable[[torch.Tensor, torch.Tensor], None]


def _instead(act: Callable[[Copy, torch.Tensor, torch.Tensor], None]) -> Install:
    """Let something else happen where a tensor is to be copied into another."""

    def wrap(real: Copy) -> Copy:
        return lambda source, destination: act(real, source, destination)

    def install() -> Undo:
        from consistency.worker.stages.transfer import copying as copies

        return replace(copies, "copy", wrap)

    return install


def _dropped(_real: Copy, _source: torch.Tensor, _destination: torch.Tensor) -> None:
    """Return as a copy does that the driver says it has made."""


def _zeros(_real: Copy, _source: torch.Tensor, destination: torch.Tensor) -> None:
    destination.zero_()


def _corrupt(real: Copy, source: torch.Tensor, destination: torch.Tensor) -> None:
    real(source, destination)
    element = destination[(0,) * destination.dim()]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[element.element_size()]
    element.view(integers).bitwise_xor_(1 << 5)


def _stale_under_load() -> Undo:
    """Deliver, while the device works, what an earlier copy of the same size brought."""
    working = False
    earlier: dict[int, torch.Tensor] = {}

    def wrap_work(real: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def under_load(*args: Any) -> Iterator[None]:
            nonlocal working
            with real(*args):
                working = True
                try:
                    yield
                finally:
                    working = False

        return under_load

    def act(real: Copy, source: torch.Tensor, destination: torch.Tensor) -> None:
        if not working:
            earlier[source.nbytes] = source
        real(earlier.get(source.nbytes, source) if working else source, destination)

    from consistency.worker.stages.transfer import delivery

    undo_copy, undo_work = _instead(act)(), replace(delivery, "under_load", wrap_work)

    def undo() -> None:
        undo_work()
        undo_copy()

    return undo


FAULTS: dict[str, Install] = {
    "transfer-dropped": _instead(_dropped),
    "transfer-zeros": _instead(_zeros),
    "transfer-corrupt": _instead(_corrupt),
    "transfer-stale-beside-work": _stale_under_load,
}
