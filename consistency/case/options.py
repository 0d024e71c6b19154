"""OPTIONS: what a user can set, read from the command line, a TOML file, pytest or Python."""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from consistency.case.load_path import GRAMMAR as LOAD_PATHS
from consistency.case.load_path import LoadPath
from consistency.case.stages import Level, Stage
from consistency.case.tolerance import Override, as_tables
from consistency.devices.spec import parse_devices
from consistency.errors import UsageError

E = TypeVar("E", bound=enum.StrEnum)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"load_paths": "roads"}):
    """Everything a user can set, from the command line, a TOML file or pytest, before any of it is checked."""

    base: str | None = None
    adapter: str | None = None
    name: str | None = None
    devices: tuple[str, ...] = ("auto",)
    dtype: Dtype = "auto"
    stages: tuple[str, ...] | None = None
    load_paths: tuple[str, ...] | None = None
    level: Level = Level.STANDARD
    inputs: str | None = None
    repeat: int | None = None
    only: tuple[str, ...] = ()
    keep: bool = False
    tolerance: tuple[Override, ...] = ()
    wrapper: str | None = None
    device_map: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    timeout: float | None = None
    stall: float = 300.0
    threads: int | None = None


def read_options(path: Path) -> dict[str, Any]:
    """Read a TOML file of options; paths in it are relative to the file.

    Raises
    ------
    UsageError
        The file is missing, is not TOML, or holds an unknown or ill-typed option.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError("no such configuration file", where=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot read the configuration file", where=path, got=error) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError("the configuration is not TOML", where=path, got=error) from None
    for key in ("devices", "stages", "roads", "only"):
        if isinstance(table.get(key), str):
            table[key] = _split(table[key])
    make_options(table, where=str(path))
    for key in ("base", "adapter", "inputs", "device_map"):
        value = table.get(key)
        if value and not value.startswith(("python:", "builtin:")) and (path.parent / value).exists():
            table[key] = str(path.parent / value)
    return table


def make_options(table: dict[str, Any], *, where: str = "options") -> Options:
    """Check a table of options and freeze it."""
    if "tolerance" in table:
        table = {**table, "tolerance": as_tables(table["tolerance"], where=f"{where}: tolerance")}
    try:
        options = msgspec.convert(table, Options)
    except msgspec.ValidationError as error:
        raise UsageError("a setting cannot be used", where=where, got=error) from None
    if options.repeat is not None and options.repeat < 1:
        raise UsageError("repeat counts runs", where=where, got=options.repeat, wanted="1 or more")
    if options.threads is not None and options.threads < 1:
        raise UsageError("threads counts threads", where=where, got=options.threads, wanted="1 or more")
    if not options.stall > 0 or not (options.timeout is None or options.timeout > 0):  # NaN is no limit either
        raise UsageError("a time limit is a number of seconds above 0", where=where)
    parse_devices(options.devices)
    parse_stages(options.stages)
    parse_load_paths(options.load_paths)
    return options


def parse_stages(names: Iterable[str] | None) -> tuple[Stage, ...] | None:
    """Turn stage names into stages, in the order in which they are run; None stays None."""
    if names is None:
        return None
    chosen = {_member(Stage, name, "--stages") for name in names}
    if not chosen:
        raise UsageError("no stage given", where="--stages", wanted=", ".join(Stage))
    return tuple(s for s in Stage if s in chosen)


def parse_load_paths(names: Iterable[str] | None) -> tuple[LoadPath, ...] | None:
    """Turn road names into roads; `all` is every one, None stays None."""
    if names is None:
        return None
    wanted = list(names)
    if wanted == ["all"]:
        return tuple(LoadPath)
    known = set(LoadPath)
    for name in wanted:
        if name not in known:
            raise UsageError(f"unknown road: {name}", where="--roads", wanted=LOAD_PATHS)
    chosen = {LoadPath(name) for name in wanted}
    if not chosen:
        raise UsageError("no road given", where="--roads", wanted=LOAD_PATHS)
    return tuple(r for r in LoadPath if r in chosen)


def _member(kind: type[E], name: str, option: str) -> E:
    try:
        return kind(name)
    except ValueError:
        raise UsageError(
            f"unknown {kind.__name__.lower()}: {name}", where=option, wanted="one of " + ", ".join(kind)
        ) from None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def split_list(text: str) -> tuple[str, ...]:
    """Split a comma-separated option."""
    return tuple(_split(text))
