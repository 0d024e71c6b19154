"""Tables that are mostly alike -> what all of them share, once, and what is each one's own."""

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
        if all(_same(one, value) for one in values):
            shared[name] = value
        elif all(isinstance(one, Mapping) for one in values) and (below := shared_by(values)):
            shared[name] = below
    return shared


def beside(table: _Table, shared: _Table) -> dict[str, Any]:
    """Return the values of a table that are not among those it shares with others."""
    own: dict[str, Any] = {}
    for name, value in table.items():
        if name not in shared:
            own[name] = value
        elif not _same(value, shared[name]):
            own[name] = beside(value, shared[name])
    return own


def joined(shared: _Table, own: _Table) -> dict[str, Any]:
    """Return the table that was taken apart."""
    table = dict(shared)
    for name, value in own.items():
        below = table.get(name)
        table[name] = joined(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return table


def _same(one: object, other: object) -> bool:
    """Return whether two values are written alike: True is no 1, and a NaN is one."""
    return repr(one) == repr(other)
