"""The named adapters of one case: each has the name that PEFT knows it by.

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
    """An adapter of a case with several, and its name.

    Attributes
    ----------
    name : str
        Name under which PEFT loads the adapter.
    path : str
        Folder of the adapter; until the case is prepared it may be an id of the Hugging Face hub.
    """

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
        pairs = [_name_and_path(item, where) for item in given]
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
    counts = Counter(name for name, _ in pairs)
    repeated_name = next((name for name, count in counts.items() if count > 1), None)
    if repeated_name is not None:
        raise UsageError(f"two adapters have the name {repeated_name}", where=where)
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
    options = dict(table)
    value = options.get("adapter")
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    named = [each for each in values if _is_named(each)]
    if not named:
        return options
    if len(named) < len(values):
        unnamed = next(each for each in values if not _is_named(each))
        raise UsageError(
            "some adapters have a name and others have none",
            where=where,
            got=unnamed,
            wanted=_WANTED,
            hint="with names they are one case, without any they are a suite",
        )
    del options["adapter"]
    return {**options, "adapters": as_named_adapters(named, where=where)}


def paths_from(adapters: Sequence[NamedAdapter], home: Path) -> tuple[NamedAdapter, ...]:
    """Return the adapters with each path that exists in the folder `home` replaced by the path there."""
    resolved = []
    for adapter in adapters:
        path = home / adapter.path
        resolved.append(msgspec.structs.replace(adapter, path=str(path)) if path.exists() else adapter)
    return tuple(resolved)


def _is_named(value: object) -> bool:
    """Return whether a value is `NAME=PATH`, and no folder that has an equals sign in its name."""
    return isinstance(value, str) and _NAMED.fullmatch(value) is not None and not Path(value).is_dir()


def _name_and_path(item: object, where: str) -> tuple[str, str]:
    if isinstance(item, NamedAdapter):
        return item.name, item.path
    match = _NAMED.fullmatch(item) if isinstance(item, str) else None
    if match is None:
        raise UsageError("an adapter without a name", where=where, got=item, wanted=_WANTED)
    return match["name"], match["path"]
