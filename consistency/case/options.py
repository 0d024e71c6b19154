"""WHAT is checked: base, adapter, dtype, stages, roads and inputs; read from options and TOML.

A `Case` is complete and immutable once made; nothing below the edge takes loose settings.
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from consistency.case.load_path import GRAMMAR as LOAD_PATHS
from consistency.case.load_path import LoadPath
from consistency.case.stages import LARGE_COPIES, LEVELS, Level, LevelPlan, Stage
from consistency.case.tolerance import Override, as_tables
from consistency.devices.spec import parse_devices
from consistency.errors import UsageError

E = TypeVar("E", bound=enum.StrEnum)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"load_paths": "roads"}):
    """One base model and one adapter, and how they are looked at.

    Attributes
    ----------
    name : str
        Short name for titles and test items.
    base : str
        A folder, or `python:package.module:function`, a factory without arguments that returns a module. Empty where
        the machine alone is looked at: every stage is then one of `MODEL_LESS`.
    adapter : str or None
        A folder saved by PEFT; None looks at the base alone.
    dtype : str
        What the base is loaded as; `auto` is what its file declares.
    roads : tuple of Road or None
        None leaves the choice to the level and the devices at hand: isolated, and shared too where there are several
        accelerators, each with the level's side roads. A side road brings the default road that it is beside with it.
    inputs : str or None
        A safetensors file with the model's keyword arguments; None makes them from the model's config.
    repeat : int
        How often each computed stage is run on each device.
    only : tuple of str
        `stage::layer` prefixes to look at; empty looks at everything.
    keep : bool
        Keep every computed tensor in full, not only where something is to be said.
    tolerance : tuple of Override
        What the user allows instead of the derived bounds; the last one that matches a tensor wins.
    wrapper : str or None
        `python:package.module:function`, which takes the plain base and returns it wrapped.
    device_map : str or None
        How the base is sharded beside the ways that the devices at hand suggest: `auto`, `balanced`, `sequential`, or a
        JSON file of module names to devices.
    allow_pickle, trust_remote_code : bool
        Off unless asked for.
    """

    name: str
    base: str
    adapter: str | None = None
    dtype: Dtype = "auto"
    stages: tuple[Stage, ...] = LEVELS[Level.STANDARD].stages
    load_paths: tuple[LoadPath, ...] | None = None
    level: Level = Level.STANDARD
    inputs: str | None = None
    repeat: int = 1
    only: tuple[str, ...] = ()
    keep: bool = False
    tolerance: tuple[Override, ...] = ()
    wrapper: str | None = None
    device_map: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    @property
    def plan(self) -> LevelPlan:
        return LEVELS[self.level]

    @property
    def factory(self) -> str | None:
        """Return `package.module:function` of a base that is made by a function, None for a folder."""
        return self.base.removeprefix("python:") if self.base.startswith("python:") else None

    @property
    def needs_model(self) -> bool:
        """Tell whether any stage looks at the model; else it is not even loaded."""
        return bool(self.base) and any(stage not in (Stage.TRANSFER, Stage.OPERATORS) for stage in self.stages)

    @property
    def reloads(self) -> bool:
        """Tell whether the adapter is loaded again over poison."""
        return self.plan.reload or self.repeat > 1

    def not_looked_at(self) -> tuple[str, ...]:
        """Name what this run left out, for the report."""
        skipped = [f"stage {s}" for s in Stage if s not in self.stages]
        rest = [text for text in self.plan.not_looked_at if text not in list(Stage)]
        if Stage.OPERATORS not in self.stages:
            rest = [text for text in rest if "operators" not in text]
        if Stage.TRANSFER not in self.stages:
            rest = [text for text in rest if text != LARGE_COPIES]
        if self.repeat > 1:
            rest = [text for text in rest if "again" not in text and "second run" not in text]
        return (*skipped, *rest)


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
