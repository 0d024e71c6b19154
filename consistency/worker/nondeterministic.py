"""Collect the operations that torch has no deterministic version of, by the warnings that it gives when they run.

The setting `deterministic_algorithms` is "warn": such an operation runs, and what comes after it has no promised bits.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self, TextIO

from consistency.worker import determinism

# `Context::alertNotDeterministic` of ATen, `alert_not_deterministic` of torch's Python operators; the second form is
# that of the backward passes of attention, which have a deterministic version that the mode "warn" does not choose
_WARNING = re.compile(
    r"(?P<operation>.+?) (does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
)


class NondeterministicOperations:
    """Collect the names of these operations as they run, while it is entered."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._restored = ExitStack()

    def __enter__(self) -> Self:
        self._restored.enter_context(warnings.catch_warnings())
        self._restored.enter_context(determinism.repeated_warnings())
        self._show_others = warnings.showwarning
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._restored.close()

    def begin(self) -> None:
        """Forget what has run, and listen again where a library has silenced warnings since."""
        self._names = {}
        warnings.filterwarnings("always", message=_WARNING.pattern)
        warnings.showwarning = self._show

    def ran(self) -> tuple[str, ...]:
        """Return the operations that ran since `begin`, in torch's words, the first one first."""
        return tuple(self._names)

    def note(self, operation: str) -> None:
        """Count an operation that torch does not warn of."""
        self._names[operation] = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Count within a `with` block only the operations inside it.

        It is for values that are computed from nothing that was computed before.
        """
        before, self._names = self._names, {}
        try:
            yield
        finally:
            self._names = before

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        match = _WARNING.match(str(message))
        if match is not None:
            if match["operation"] in self._names:
                return  # the log has it
            self._names[match["operation"]] = None
        self._show_others(message, category, filename, lineno, file, line)
