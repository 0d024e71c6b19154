"""Run a model with its adapter disabled by PEFT's own code, and tell where PEFT does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from consistency.errors import first_line
from consistency.worker.device_error import is_of_the_device
from consistency.worker.model.running import device_of


class DisableRefusedError(Exception):
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
        try:
            stack.enter_context(model.disable_adapter())
        except Exception as error:  # PEFT's code raises anything
            if is_of_the_device(error, device_of(model)):
                raise
            raise DisableRefusedError(first_line(error)) from error
        yield
