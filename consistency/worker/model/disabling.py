"""Run a model with its adapter disabled by PEFT's own code, and tell where PEFT does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from consistency.worker.model.running import model_code
from consistency.worker.recorder import Skip


class DisableRefusedError(Skip):
    """PEFT does not disable this adapter; the message is PEFT's."""


@contextmanager
def disabled(model: Any) -> Iterator[None]:
    """Disable the adapter, and enable it again at the end.

    Raises
    ------
    DisableRefusedError
        Any error of PEFT's on the way in: some methods have nothing to disable, and a prompt on a model that does not
        generate ends in an error.
    """
    with ExitStack() as stack:
        with model_code(model, raises=DisableRefusedError):
            stack.enter_context(model.disable_adapter())
        yield
