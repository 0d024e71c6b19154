"""Settings of a worker that are to differ from what its device and road give it: one trial of a bisection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from consistency.case.load_path import LoadPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is different in a worker.

    Attributes
    ----------
    name : str
        What it is called in a report.
    environment : mapping of str to str or None
        Variables by name; None takes one away.
    settings : mapping of str to object
        Determinism settings by name.
    threads : int or None
        Threads per operation.
    road : Road or None
        Another road.
    autocast_adapter_dtype : bool or None
        PEFT's argument: off, the adapter takes the base's dtype instead of float32.
    """

    name: str = ""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    load_path: LoadPath | None = None
    autocast_adapter_dtype: bool | None = None

    @property
    def touches(self) -> frozenset[str]:
        """Name everything that it sets: two changes that touch the same cannot be made at once."""
        names = {*self.environment, *self.settings}
        names |= {"threads"} if self.threads is not None else set()
        names |= {"load_path"} if self.load_path is not None else set()
        return frozenset(names | ({"autocast_adapter_dtype"} if self.autocast_adapter_dtype is not None else set()))

    @staticmethod
    def together(changes: Iterable[Change]) -> Change:
        """Return several changes as one."""
        environment: dict[str, str | None] = {}
        settings: dict[str, Any] = {}
        threads, load_path, autocast, names = None, None, None, []
        for change in changes:
            environment.update(change.environment)
            settings.update(change.settings)
            threads, load_path = change.threads or threads, change.load_path or load_path
            autocast = autocast if change.autocast_adapter_dtype is None else change.autocast_adapter_dtype
            names.append(change.name)
        return Change(
            name=" and ".join(names),
            environment=environment,
            settings=settings,
            threads=threads,
            load_path=load_path,
            autocast_adapter_dtype=autocast,
        )
