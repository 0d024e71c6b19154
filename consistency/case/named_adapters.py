"""SEVERAL ADAPTERS OF ONE CASE: each with the name that PEFT knows it by.

`--adapter one=./x --adapter two=./y` on a command line, `adapters = {one = "./x", two = "./y"}` in TOML and Python.
Adapters without names, and patterns, are those of a suite: one case for each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from consistency.errors import UsageError

RESERVED = "default"
"""The name under which every other stage loads the first adapter."""

# PEFT makes the name a part of parameter names, so a dot would be another module
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NAMED = re.compile(rf"(?P<name>{_NAME.pattern})=(?P<path>.+)", re.DOTALL)
_WANTED = "NAME=PATH, with a name of letters, digits, _ and -"


class NamedAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter and its name; `path` is a folder, or a hub id until the case is prepared."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


def as_named_adapters(given: object, *, where: str) -> tuple[NamedAdapter, ...]:
    """Return the adapters of a table of names and paths, or of a list of `NAME=PATH`.

    Raises
    ------
    UsageError
        A name is missing, given twice, or none that PEFT can use; or there are fewer than two adapters.
    """
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, (list, tuple)):
        pairs = [(one.name, one.path) if isinstance(one, NamedAdapter) else _pair(one, where) for one in given]
    else:
        raise UsageError("adapters is not a table", where=where, got=given, wanted='{one = "PATH", two = "PATH"}')
    for name, path in pairs:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError("not the name of an adapter", where=where, got=name, wanted=_WANTED)
        if name == RESERVED:
            hint = f"every other stage loads the first adapter as {RESERVED}"
            raise UsageError(f"an adapter cannot be named {RESERVED} here", where=where, hint=hint)
        if not isinstance(path, str) or not path.strip():
            raise UsageError(f"the adapter {name} has no path", where=where, got=path, wanted=_WANTED)
    twice = next((name for name, count in Counter(name for name, _ in pairs).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"two adapters have the name {twice}", where=where)
    if len(pairs) < 2:
        hint = "leave out the name to check one adapter"
        raise UsageError(
            "only one adapter was given, and it has a name", where=where, wanted="two adapters at least", hint=hint
        )
    return tuple(NamedAdapter(name=name, path=path) for name, path in pairs)


def with_named_adapters(table: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return options, as they were given, with `NAME=PATH` values of `adapter` as a table `adapters`.

    A value is a path wherever a folder of that very name exists.
    """
    found = dict(table)
    values = found.get("adapter")
    several = list(values) if isinstance(values, (list, tuple)) else [values]
    named = [one for one in several if _is_named(one)]
    if not named:
        return found
    if len(named) < len(several):
        without = next(one for one in several if not _is_named(one))
        raise UsageError(
            "some adapters have a name and others have none",
            where=where,
            got=without,
            wanted=_WANTED,
            hint="with names they are one case, without any they are a suite",
        )
    del found["adapter"]
    return {**found, "adapters": as_named_adapters(named, where=where)}


def paths_from(adapters: Sequence[NamedAdapter], home: Path) -> tuple[NamedAdapter, ...]:
    """Return adapters whose relative paths are relative to a folder, where they exist there."""
    return tuple(
        msgspec.structs.replace(one, path=str(home / one.path)) if (home / one.path).exists() else one
        for one in adapters
    )


def _is_named(value: object) -> bool:
    return isinstance(value, str) and _NAMED.fullmatch(value) is not None and not Path(value).is_dir()


def _pair(text: object, where: str) -> tuple[str, str]:
    found = _NAMED.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise UsageError("an adapter without a name", where=where, got=text, wanted=_WANTED)
    return found["name"], found["path"]
