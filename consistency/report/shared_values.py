"""Take mostly equal tables apart into the values that all of them share, and the values of each that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_Table = Mapping[str, Any]


def shared_by(tables: Sequence[_Table]) -> dict[str, Any]:
    """Return the values that all tables have, at any depth."""
    if not tables:
        return {}
    shared: dict[str, Any] = {}
    for name, value in tables[0].items():
        if not all(name in table for table in tables):
            continue
        values = [table[name] for table in tables]
        if all(_is_same(other, value) for other in values):
            shared[name] = value
        elif all(isinstance(other, Mapping) for other in values):
            shared_below = shared_by(values)
            if shared_below:
                shared[name] = shared_below
    return shared


def beside(table: _Table, shared: _Table) -> dict[str, Any]:
    """Return the values of a table that are not among those it shares with others."""
    unshared: dict[str, Any] = {}
    for name, value in table.items():
        if name not in shared:
            unshared[name] = value
        elif not _is_same(value, shared[name]):
            unshared[name] = beside(value, shared[name])
    return unshared


def joined(shared: _Table, unshared: _Table) -> dict[str, Any]:
    """Return the table that was taken apart into these."""
    table = dict(shared)
    for name, value in unshared.items():
        below = table.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            table[name] = joined(below, value)
        else:
            table[name] = value
    return table


def _is_same(value: object, other: object) -> bool:
    """Return whether two values are written alike: True is not 1, and a NaN is the same as another."""
    return repr(value) == repr(other)
