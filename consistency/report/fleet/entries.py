"""Things that are mostly alike -> few entries: what they share once, and a list for each field that is their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from consistency.capture.json_codec import encode_json

MOST_KINDS = 4
"""A field with more values is a thing's own: the architectures of a fleet and its versions of software are fewer, the
devices of a host and the hosts are more."""

_NESTED = "environment"


def gathered(
    things: Sequence[Mapping[str, Any]], *, alone: Sequence[int] = (), kinds: Sequence[str] = ()
) -> list[tuple[list[int], dict[str, Any]]]:
    """Return entries, each with the places of its things.

    Parameters
    ----------
    things : sequence of mapping
        As JSON has them.
    alone : sequence of int
        Places of things that get an entry of their own.
    kinds : sequence of str
        Fields in which the things of an entry are equal, whatever the number of values.
    """
    flat = [_flat(thing) for thing in things]
    texts = [{name: encode_json(value) for name, value in thing.items()} for thing in flat]
    values: dict[str, set[bytes]] = {}
    for text in texts:
        for name, value in text.items():
            values.setdefault(name, set()).add(value)
    own = {name for name, found in values.items() if len(found) > MOST_KINDS and name not in kinds}
    entries: dict[object, list[int]] = {}
    single = frozenset(alone)
    for place, text in enumerate(texts):
        shared = tuple((name, b"" if name in own else value) for name, value in text.items())
        entries.setdefault(place if place in single else shared, []).append(place)
    return [(places, _entry([flat[place] for place in places], own)) for places in entries.values()]


def spread(entry: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yield the things of an entry; raise `ValueError` where its lists are not of their number."""
    shared = _flat({name: value for name, value in entry.items() if name != "each"})
    lists: dict[str, Any] = {}
    for name, column in (entry.get("each") or {}).items():
        lists[name] = lists.get(column) if isinstance(column, str) else column
        if not isinstance(lists[name], list) or len(lists[name]) != count:
            raise ValueError(f"{name} has not {count} values")
    for place in range(count):
        yield _nested({**shared, **{name: values[place] for name, values in lists.items()}})


def _entry(things: Sequence[Mapping[str, Any]], own: set[str]) -> dict[str, Any]:
    """Return what things share and, below `each`, lists of what they do not; of equal lists the name of the first."""
    found: dict[str, Any] = {}
    each: dict[str, Any] = {}
    lists: dict[bytes, str] = {}
    for name, first in things[0].items():
        column = [thing[name] for thing in things]
        if name not in own or all(value == first for value in column):
            found[name] = first
        else:
            same = lists.setdefault(encode_json(column), name)
            each[name] = column if same == name else same
    return _nested(found) | ({"each": each} if each else {})


def _flat(thing: Mapping[str, Any]) -> dict[str, Any]:
    """Return a thing with the values of its environment, at any depth, beside its other fields."""
    return dict(_leaves(thing, ""))


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        is_nested = isinstance(value, dict) and value and (prefix or name == _NESTED)
        if is_nested and all("." not in key for key in value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = name.split(".") if name.startswith(f"{_NESTED}.") else [name]
        into = found
        for part in above:
            into = into.setdefault(part, {})
        into[last] = value
    return found
