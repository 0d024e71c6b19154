"""The settings that a user chose with `--set`, on top of a profile. No torch here.

The profile `pinned` fixes every setting that affects results; `deployed` leaves each as the user's libraries and
environment have it. `consistency.devices.settings` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from consistency.devices.settings import parse_setting
from consistency.errors import UsageError

_EXAMPLE = "NAME=VALUE, such as float32_matmul_precision=high"


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and its chosen value, of the setting's type."""

    name: str
    value: bool | str | None

    def __str__(self) -> str:
        """Return the text that the command line accepts for it."""
        value = "none" if self.value is None else self.value
        return f"{self.name}={str(value).lower()}"


def as_switches(given: object, *, where: str) -> tuple[Switch, ...]:
    """Read settings: a table, or a list of `NAME=VALUE`, of which the last of a name applies.

    Raises
    ------
    UsageError
        There is no such setting, or it takes no such value.
    """
    if isinstance(given, Mapping):
        pairs: Iterable[tuple[object, object]] = given.items()
    elif isinstance(given, (list, tuple)):
        pairs = [_pair(item, where=where) for item in given]
    else:
        raise UsageError("settings are a table or a list", where=where, got=given, wanted=_EXAMPLE)
    values = dict(parse_setting(str(name), value, where=where) for name, value in pairs)
    return tuple(Switch(name=name, value=value) for name, value in values.items())


def merged(*several: Iterable[Switch]) -> tuple[Switch, ...]:
    """Return the settings of several places; where several have a name, the last one applies."""
    by_name: dict[str, Switch] = {}
    for switches in several:
        by_name |= {switch.name: switch for switch in switches}
    return tuple(by_name.values())


def _pair(item: object, *, where: str) -> tuple[object, object]:
    """Return the name and the value of a `Switch`, or of a text `NAME=VALUE`."""
    if isinstance(item, Switch):
        return item.name, str(item).partition("=")[2]
    name, equals, value = str(item).partition("=")
    if not isinstance(item, str) or not equals or not name.strip() or not value.strip():
        raise UsageError("a setting is chosen as NAME=VALUE", where=where, got=item, wanted=_EXAMPLE)
    return name, value
