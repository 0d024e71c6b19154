"""The accelerators that this tool is known to have run on. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from consistency.devices.backends import CPU

SEEN: frozenset[str] = frozenset()
"""Models, as reports name them: each has a row in `docs/hardware-log.md`."""

FIRST_STEPS = "docs/first-gpu.md"

_ELSEWHERE = (CPU, "xla")
"""Types of devices that have documents of their own."""


def unseen(models: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the models of accelerators on which no run is known, each once.

    `models` has pairs of a device's type and its model.
    """
    return tuple(dict.fromkeys(model for kind, model in models if kind not in _ELSEWHERE and model not in SEEN))
