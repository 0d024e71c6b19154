"""Values under the keys that they have in common, and the names in many sets of workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def gathered(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, both in the order in which they came."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def names_in(sets: Iterable[tuple[str, ...]]) -> dict[str, None]:
    """Return the workers of many sets, each once; a set that is met again costs nothing, since equal ones are one."""
    return {name: None for workers in {id(some): some for some in sets}.values() for name in workers}
