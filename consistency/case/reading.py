"""Options as values: each is parsed once, where it is given, and named there when it cannot be used."""

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
_BY_NAME = {name: option for option in OPTIONS for name in (option.name, option.attribute)}


def make_options(table: Mapping[str, object], base: Options | None = None) -> Options:
    """Parse options that are given by name in Python; `base` holds those that are not given."""
    table = with_named_adapters(as_text(table), where="adapter")
    base = base or Options()
    texts = {option.attribute: as_text(getattr(base, option.attribute)) for option in OPTIONS if option.is_path}
    return dataclasses.replace(base, **{**texts, **parse(table, where=str)}, source=Source(edge=Edge.TOML))


def as_text(given: Any) -> Any:
    """Return a value of Python with a text in the place of each path in it, as a TOML file has it."""
    if isinstance(given, os.PathLike):
        return os.fsdecode(given)
    if isinstance(given, Mapping):
        return {name: as_text(value) for name, value in given.items()}
    return type(given)(map(as_text, given)) if type(given) in (list, tuple) else given


def gather_options(config: str | Path | None, given: Mapping[str, object], edge: Edge) -> Options:
    """Merge the options of a TOML file with those of a command line, which win; None stands for one not given."""
    file = {} if config is None else read_options(Path(config))
    of_line = {name: value for name, value in given.items() if value is not None}
    own = parse(with_named_adapters(of_line, where=edge.spell("adapter")), where=edge.spell)
    places = {_BY_NAME[name].name: f"{_BY_NAME[name].name} in {config}" for name in file if name not in own}
    return layered(file, own, source=Source(edge=edge, places=places))


def layered(*layers: Mapping[str, Any], source: Source) -> Options:
    """Return the options of several places, by field; those of a later one win."""
    # the last tolerance that matches applies: those of the command line follow those of the file
    tolerance = tuple(one for layer in layers for one in layer.get("tolerance", ()))
    switches = merged(*(layer.get("set", ()) for layer in layers))
    fields: dict[str, Any] = {}
    for layer in layers:
        if "adapter" in layer or "adapters" in layer:  # one adapter and several take the place of each other
            fields = {name: value for name, value in fields.items() if name not in ("adapter", "adapters")}
        fields |= layer
    return Options(**{**fields, "tolerance": tolerance, "set": switches}, source=source)


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
    """Return the options of a TOML file, or of a part of it; a relative path in it is relative to the file."""
    values = parse(table, where=lambda name: f"{name} in {part}{path}")
    for name, value in values.items():
        if name == "adapters":
            values[name] = paths_from(value, path.parent)
            continue
        if name == "engine_outputs":
            values[name] = files_from(value, path.parent)
            continue
        is_path = _BY_NAME[name].is_path and not value.startswith(("python:", "builtin:"))
        if is_path and (path.parent / value).exists():
            values[name] = str(path.parent / value)
    return values


def parse(table: Mapping[str, object], *, where: Callable[[str], str]) -> dict[str, Any]:
    """Return typed values by field of `Options`; `where` names the place of an option in errors."""
    values: dict[str, Any] = {}
    for name, given in table.items():
        if name not in _BY_NAME:
            raise unknown_option(name, where(name))
        option = _BY_NAME[name]
        if option.attribute in values:
            raise UsageError(f"{option.name} is given twice", where=where(name), hint=f"{name} is another name for it")
        values[option.attribute] = _value(option, given, where(name))
    return values


def unknown_option(name: str, where: str) -> UsageError:
    """Return the error for an option that does not exist."""
    known = [option.name for option in OPTIONS]
    return UsageError(f"unknown option: {name}", where=where, wanted=", ".join(known), hint=did_you_mean(name, known))


def _refuse_nul(option: Option, given: object, where: str) -> None:
    """Raise UsageError where a text holds a character that no path, and no argument of a program, can hold."""
    if isinstance(given, str) and "\0" in given:
        raise UsageError(f"{option.name} holds a NUL character", where=where, got=repr(given))
    if isinstance(given, Mapping):
        given = [*given, *given.values()]
    if isinstance(given, (list, tuple)):
        for one in given:
            _refuse_nul(option, one, where)


def _value(option: Option, given: object, where: str) -> object:
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
            given = parse_devices(_names(option, given, where), where=where)
        case "stages":
            given = _members(SPECS, _names(option, given, where), "stage", where, wanted="one of " + ", ".join(SPECS))
        case "load_paths":
            names = _names(option, given, where)
            given = _members(LoadPath, LoadPath if names == ["all"] else names, "load path", where, wanted=GRAMMAR)
        case "for":
            given = parse_duration(given, where=where)
        case "only":
            given = _names(option, given, where)
    if isinstance(given, str) and not given.strip() and (option.is_path or option.choices or option.name == "wrapper"):
        raise UsageError(f"{option.name} is empty", where=where, wanted=_wanted(option))
    if option.choices is not None and given not in option.choices:
        hint = did_you_mean(str(given), option.choices)
        raise UsageError(f"unknown {option.name}: {given}", where=where, wanted=_wanted(option), hint=hint)
    value = _convert(option, given, _TYPES[option.attribute], where)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:  # NaN is not above 0 either
        raise UsageError(f"{option.name} is out of range", where=where, got=value, wanted="a number above 0")
    return value


def _wanted(option: Option) -> str:
    return "one of " + ", ".join(option.choices) if option.choices else option.help


def _names(option: Option, given: object, where: str) -> list[str]:
    """Return the items of a list, which may be written with commas."""
    items = given.split(",") if isinstance(given, str) else _convert(option, given, tuple[str, ...], where)
    return [item.strip() for item in items if item.strip()]


def _members(known: Iterable[E], names: Iterable[str], noun: str, where: str, *, wanted: str) -> tuple[E, ...]:
    """Return those that are known of these names, in the order in which they are known."""
    every = list(known)
    chosen = set(names)
    unknown = sorted(chosen.difference(every))
    if unknown:
        _refuse_absent(noun, unknown[0], where)
        raise UsageError(
            f"unknown {noun}: {unknown[0]}", where=where, wanted=wanted, hint=did_you_mean(unknown[0], every)
        )
    if not chosen:
        raise UsageError(f"no {noun} given", where=where, wanted=wanted)
    return tuple(member for member in every if member in chosen)


def _refuse_absent(noun: str, name: str, where: str) -> None:
    """Raise UsageError for what an extra adds that is not installed."""
    extra = plugins.absent("stages").get(name) if noun == "stage" else None
    if extra is not None:
        sentence = plugins.not_installed(f"the stage {name}", extra)
        raise UsageError(sentence, where=where, hint=plugins.INSTALL)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _convert(option: Option, given: object, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        is_list = kind == tuple[str, ...]
        wanted = "a list of texts" if is_list else _KINDS.get(cast(type, option.type), "a text")
        example = f": {option.help}" if option.type is str and not option.choices else ""
        raise UsageError(
            f"{option.name} is not {wanted}",
            where=where,
            got=_described(given),
            wanted=wanted + (", or one text with commas" if is_list else "") + example,
        ) from None


def _described(given: object) -> str:
    """Return a value as its own language shows it, and what it is."""
    for kind, text in {**_KINDS, bool: "a boolean", list: "a list", tuple: "a list", dict: "a table"}.items():
        if isinstance(given, kind):
            return f"{given!r}, {text}"
    return f"{given!r}, of type {type(given).__name__}"
