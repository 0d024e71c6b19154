"""Parse options into values: each is parsed once, where it is given, and named there when it cannot be used."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import msgspec

from consistency import plugins
from consistency.case.duration import parse_duration
from consistency.case.engine_file import EngineFile, as_engine_files, files_from
from consistency.case.load_path import GRAMMAR, LoadPath
from consistency.case.named_adapters import NamedAdapter, as_named_adapters, paths_from, with_named_adapters
from consistency.case.options import OPTIONS, Edge, Option, Options, Source
from consistency.case.profile import Switch, as_switches, merged
from consistency.case.stages import SPECS
from consistency.case.tolerance import Override, as_overrides
from consistency.devices.spec import parse_devices
from consistency.errors import UsageError, did_you_mean

E = TypeVar("E", bound=str)

_TYPES = get_type_hints(Options, localns={kind.__name__: kind for kind in (EngineFile, NamedAdapter, Override, Switch)})
# An option may be given by its name, or by the name of its field in Python.
_BY_NAME = {option.name: option for option in OPTIONS} | {option.attribute: option for option in OPTIONS}


def make_options(table: Mapping[str, object], base: Options | None = None) -> Options:
    """Parse options that are given by name in Python; `base` holds the values of options that are not given."""
    table = with_named_adapters(as_text(table), where="adapter")
    base = base or Options()
    paths = {option.attribute: as_text(getattr(base, option.attribute)) for option in OPTIONS if option.is_path}
    return dataclasses.replace(base, **{**paths, **parse(table, where=str)}, source=Source(edge=Edge.TOML))


def as_text(given: Any) -> Any:
    """Return a value of Python with a text in the place of each path in it, as a TOML file has it."""
    if isinstance(given, os.PathLike):
        return os.fsdecode(given)
    if isinstance(given, Mapping):
        return {name: as_text(value) for name, value in given.items()}
    # a subclass, such as a named tuple, is left as it is: it may not be made from a list
    if type(given) in (list, tuple):
        return type(given)(map(as_text, given))
    return given


def gather_options(config: str | Path | None, given: Mapping[str, object], edge: Edge) -> Options:
    """Merge the options of a TOML file with those of a command line, which win; None stands for one not given."""
    file = {} if config is None else read_options(Path(config))
    line = {name: value for name, value in given.items() if value is not None}
    line_values = parse(with_named_adapters(line, where=edge.spell("adapter")), where=edge.spell)
    places: dict[str, str] = {}
    for name in file:
        if name not in line_values:
            option = _BY_NAME[name]
            places[option.name] = f"{option.name} in {config}"
    return layered(file, line_values, source=Source(edge=edge, places=places))


def layered(*layers: Mapping[str, Any], source: Source) -> Options:
    """Return the options of several places, each by the field of `Options`; a later place wins."""
    # the last tolerance that matches applies: those of the command line follow those of the file
    tolerance: list[Override] = []
    for layer in layers:
        tolerance += layer.get("tolerance", ())
    switches = merged(*(layer.get("set", ()) for layer in layers))
    fields: dict[str, Any] = {}
    for layer in layers:
        # one adapter and several take the place of each other
        if "adapter" in layer or "adapters" in layer:
            fields.pop("adapter", None)
            fields.pop("adapters", None)
        fields |= layer
    return Options(**{**fields, "tolerance": tuple(tolerance), "set": switches}, source=source)


def read_options(path: Path) -> dict[str, Any]:
    """Read the options that a TOML file sets."""
    return options_of(read_table(path), path)


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError("no such configuration file", where=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot read the configuration file", where=path, got=error) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise UsageError("the configuration is not TOML", where=path, got=error) from None


def options_of(table: Mapping[str, object], path: Path, *, part: str = "") -> dict[str, Any]:
    """Return the options of a TOML file, or of a part of it; a relative path in it is relative to the file.

    `part` precedes the name of the file in errors: `[[case]] 2 of `.
    """
    values = parse(table, where=lambda name: f"{name} in {part}{path}")
    home = path.parent
    for name, value in values.items():
        if name == "adapters":
            values[name] = paths_from(value, home)
        elif name == "engine_outputs":
            values[name] = files_from(value, home)
        elif _BY_NAME[name].is_path and not value.startswith(("python:", "builtin:")) and (home / value).exists():
            values[name] = str(home / value)
    return values


def parse(table: Mapping[str, object], *, where: Callable[[str], str]) -> dict[str, Any]:
    """Return typed values by field of `Options`; `where` names the place of an option in errors.

    Raises
    ------
    UsageError
        An option is unknown, given under two names, or has a value that cannot be used.
    """
    values: dict[str, Any] = {}
    for name, given in table.items():
        if name not in _BY_NAME:
            raise unknown_option(name, where(name))
        option = _BY_NAME[name]
        if option.attribute in values:
            raise UsageError(f"{option.name} is given twice", where=where(name), hint=f"{name} is another name for it")
        values[option.attribute] = _parse_value(option, given, where(name))
    return values


def unknown_option(name: str, where: str) -> UsageError:
    """Return the error for an option that does not exist."""
    names = [option.name for option in OPTIONS]
    return UsageError(f"unknown option: {name}", where=where, wanted=", ".join(names), hint=did_you_mean(name, names))


def _refuse_nul(option: Option, given: object, where: str) -> None:
    """Raise UsageError where a text holds a character that no path, and no argument of a program, can hold."""
    if isinstance(given, str) and "\0" in given:
        raise UsageError(f"{option.name} holds a NUL character", where=where, got=repr(given))
    if isinstance(given, Mapping):
        given = [*given, *given.values()]
    if isinstance(given, (list, tuple)):
        for item in given:
            _refuse_nul(option, item, where)


def _parse_value(option: Option, given: object, where: str) -> object:
    """Return the value of an option, of the type of its field."""
    _refuse_nul(option, given, where)
    match option.name:
        case "tolerance":
            return as_overrides(given, where=where)
        case "set":
            return as_switches(given, where=where)
        case "adapters":
            return as_named_adapters(given, where=where)
        case "engine_outputs":
            return as_engine_files(given, where=where)
        case "devices":
            given = parse_devices(_items(option, given, where), where=where)
        case "stages":
            given = _members(SPECS, _items(option, given, where), "stage", where, wanted="one of " + ", ".join(SPECS))
        case "load_paths":
            names: Iterable[str] = _items(option, given, where)
            if names == ["all"]:
                names = LoadPath
            given = _members(LoadPath, names, "load path", where, wanted=GRAMMAR)
        case "for":
            given = parse_duration(given, where=where)
        case "only":
            given = _items(option, given, where)
    return _check_value(option, given, where)


def _check_value(option: Option, given: object, where: str) -> object:
    """Return a value of the type of the option's field; raise UsageError where it is empty or out of range."""
    must_not_be_empty = option.is_path or option.choices or option.name == "wrapper"
    if must_not_be_empty and isinstance(given, str) and not given.strip():
        raise UsageError(f"{option.name} is empty", where=where, wanted=_wanted(option))
    if option.choices is not None and given not in option.choices:
        hint = did_you_mean(str(given), option.choices)
        raise UsageError(f"unknown {option.name}: {given}", where=where, wanted=_wanted(option), hint=hint)
    value = _convert(option, given, _TYPES[option.attribute], where)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and not value > 0:  # NaN is not above 0 either
        raise UsageError(f"{option.name} is out of range", where=where, got=value, wanted="a number above 0")
    if is_number and option.most is not None and value > option.most:
        raise UsageError(
            f"{option.name} is out of range", where=where, got=value, wanted=f"a number of {option.most} at most"
        )
    return value


def _wanted(option: Option) -> str:
    """Return what an option takes, for an error."""
    return "one of " + ", ".join(option.choices) if option.choices else option.help


def _items(option: Option, given: object, where: str) -> list[str]:
    """Return the items of a list, which may be written with commas."""
    items = given.split(",") if isinstance(given, str) else _convert(option, given, tuple[str, ...], where)
    return [item.strip() for item in items if item.strip()]


def _members(known: Iterable[E], names: Iterable[str], noun: str, where: str, *, wanted: str) -> tuple[E, ...]:
    """Return the known members that are named, in the order in which they are known.

    `noun` says in an error what a member is, and `wanted` which ones there are.

    Raises
    ------
    UsageError
        A name is unknown, or there is none.
    """
    members = list(known)
    chosen = set(names)
    unknown = sorted(chosen.difference(members))
    if unknown:
        _refuse_absent(noun, unknown[0], where)
        hint = did_you_mean(unknown[0], members)
        raise UsageError(f"unknown {noun}: {unknown[0]}", where=where, wanted=wanted, hint=hint)
    if not chosen:
        raise UsageError(f"no {noun} given", where=where, wanted=wanted)
    return tuple(member for member in members if member in chosen)


def _refuse_absent(noun: str, name: str, where: str) -> None:
    """Raise UsageError for a stage of an extra that is not installed; `noun` says what kind of thing is named."""
    extra = plugins.absent("stages").get(name) if noun == "stage" else None
    if extra is not None:
        sentence = plugins.not_installed(f"the stage {name}", extra)
        raise UsageError(sentence, where=where, hint=plugins.INSTALL)


# in this order: True is an int in Python, and must be found as a boolean
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _convert(option: Option, given: object, kind: Any, where: str) -> Any:
    """Return a value converted to a type; raise UsageError, which says what was given, where that is not possible."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        noun = _KINDS.get(cast(type, option.type), "a text")
        wanted = noun
        if kind == tuple[str, ...]:
            noun = "a list of texts"
            wanted = f"{noun}, or one text with commas"
        if option.type is str and not option.choices:
            wanted += f": {option.help}"
        raise UsageError(f"{option.name} is not {noun}", where=where, got=_described(given), wanted=wanted) from None


def _described(given: object) -> str:
    """Return a value as its own language shows it, and the kind of value: `True, a boolean`."""
    kinds = {**_KINDS, bool: "a boolean", list: "a list", tuple: "a list", dict: "a table"}
    for kind, noun in kinds.items():
        if isinstance(given, kind):
            return f"{given!r}, {noun}"
    return f"{given!r}, of type {type(given).__name__}"
