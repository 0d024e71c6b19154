"""Changes of a worker's environment and settings, which a bisection tries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from consistency.case.load_path import LoadPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Environment, settings and arguments that differ in a worker."""

    name: str = ""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables by name; None removes one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Determinism settings by name."""
    threads: int | None = None
    load_path: LoadPath | None = None
    autocast_adapter_dtype: bool | None = None
    """PEFT's argument: off, the adapter takes the base's dtype instead of float32."""

    @property
    def touches(self) -> frozenset[str]:
        """Names of everything that the change sets: two changes that set the same thing cannot be made at once."""
        return frozenset({*self.environment, *self.settings, *self._single()})

    def _single(self) -> dict[str, Any]:
        """Return the fields with one value that are set, by name."""
        # those are the fields whose default is None
        values = {declared.name: getattr(self, declared.name) for declared in fields(self) if declared.default is None}
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def together(changes: Iterable[Change]) -> Change:
        """Return several changes as one; of two that set the same thing, the later one counts."""
        changes = tuple(changes)
        environment: dict[str, str | None] = {}
        settings: dict[str, Any] = {}
        single: dict[str, Any] = {}
        for change in changes:
            environment |= change.environment
            settings |= change.settings
            single |= change._single()
        name = " and ".join(change.name for change in changes)
        return Change(name=name, environment=environment, settings=settings, **single)
