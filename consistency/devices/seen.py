"""The accelerators that this tool is known to have run on. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from consistency.devices.backends import CPU

SEEN: frozenset[str] = frozenset()
"""Models, as reports name them: each has a row in `docs/hardware-log.md`."""

FIRST_STEPS = "docs/first-gpu.md"

_ELSEWHERE = (CPU, "xla")
"""Types with documents of their own."""


def unseen(models: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the models of accelerators, each once, that no run is known of; given types and models of devices."""
    return tuple(dict.fromkeys(model for kind, model in models if kind not in _ELSEWHERE and model not in SEEN))
