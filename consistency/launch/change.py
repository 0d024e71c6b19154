"""Settings of a worker that differ from what its device and load path give it: one trial of a bisection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from consistency.case.load_path import LoadPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What differs in a worker."""

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
        """Name everything that it sets: two changes that set the same thing cannot be made at once."""
        return frozenset({*self.environment, *self.settings, *self._single()})

    def _single(self) -> dict[str, Any]:
        """Return the fields with one value that are set, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.default is None}
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def together(changes: Iterable[Change]) -> Change:
        """Return several changes as one."""
        changes = tuple(changes)
        return Change(
            name=" and ".join(change.name for change in changes),
            environment={name: value for change in changes for name, value in change.environment.items()},
            settings={name: value for change in changes for name, value in change.settings.items()},
            **{name: value for change in changes for name, value in change._single().items()},
        )
