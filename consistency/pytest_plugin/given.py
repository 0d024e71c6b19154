"""Read the options of a pytest session: its command line, and below that its ini file."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from consistency.capture.transport import is_remote
from consistency.case.options import OPTIONS, Edge, Option
from consistency.case.reading import parse, read_options, unknown_option
from consistency.case.suite import gather_suite
from consistency.errors import UsageError
from consistency.workflows.api import run

_NO_PATH = ("python:", "builtin:")  # beginnings of a base or an adapter that is no folder

# The name of each option in Python, by that name and by its name on the command line.
_ATTRIBUTES = {option.name: option.attribute for option in OPTIONS}
_ATTRIBUTES |= {option.attribute: option.attribute for option in OPTIONS}

# Keywords of `consistency.run` beside the options of a case.
_RUN_KEYWORDS = frozenset(inspect.signature(run).parameters) - {"case", "options"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options of a session."""

    file: Path | None  # TOML file of options; `options` win over it
    options: Mapping[str, object]  # by name, as a command line gives them; those that are not given are left out
    out: Path | None
    history: str | None  # path or URL
    baseline: Path | None
    architectures: tuple[str, ...]  # patterns; without any, every device has items

    def case_options(self) -> dict[str, Any]:
        """Return the keywords that `consistency.run` takes for a case with these options; none of a suite's file."""
        file_options: Mapping[str, object] = {}
        if self.file is not None and gather_suite(self.file, {}, Edge.PYTEST) is None:
            file_options = read_options(self.file)
        past = {"history": self.history, "baseline": self.baseline}
        keywords = by_attribute(file_options) | by_attribute(self.options) | past
        return {name: value for name, value in keywords.items() if value is not None}


def by_attribute(options: Mapping[str, object], where: str = "") -> dict[str, Any]:
    """Return options by their names in Python; an option has one of them, whichever name it was given by.

    Raises
    ------
    UsageError
        There is no such option; `where` names the place.
    """
    for name in options:
        if name not in _ATTRIBUTES and name not in _RUN_KEYWORDS:
            raise unknown_option(str(name), where)
    return {_ATTRIBUTES.get(name, name): value for name, value in options.items()}


def read_given(config: pytest.Config) -> Given:
    """Return the options of a session; a file that the command line names replaces the ini options of the case.

    Raises
    ------
    UsageError
        The value of an ini option cannot be used.
    """
    typed = {option.name: config.getoption(f"consistency_{option.name}", None) for option in OPTIONS}
    file = config.getoption("consistency_config", None)
    options: dict[str, object] = {} if file is not None else _ini_options(config)
    if typed["adapter"] is not None:  # one adapter and several take the place of each other
        options.pop("adapters", None)
    for option in OPTIONS:
        value = typed[option.name]
        if value is None:
            continue
        ini_value = options.get(option.name)
        if option.repeatable and isinstance(ini_value, list):
            value = [*ini_value, *value]
        options[option.name] = value
    if file is None:
        file = _ini_path(config, "config")
    out = config.getoption("consistency_out", None)
    baseline = config.getoption("consistency_baseline", None)
    return Given(
        file=None if file is None else Path(config.invocation_params.dir, file),
        options=options,
        out=_path(config, "out", out),
        history=config.getoption("consistency_history", None) or _ini_path(config, "history"),
        baseline=_path(config, "baseline", baseline),
        architectures=tuple(config.getoption("consistency_arch", None) or config.getini("consistency_arch") or ()),
    )


def _path(config: pytest.Config, name: str, typed: str | None) -> Path | None:
    """Return a path from the command line, or else from the ini file."""
    if typed is not None:
        return Path(config.invocation_params.dir, typed)
    ini_path = _ini_path(config, name)
    return None if ini_path is None else Path(ini_path)


def _ini_path(config: pytest.Config, name: str) -> str | None:
    """Return a path or URL from the ini file; None where it has none."""
    value: str | None = config.getini(f"consistency_{name}")
    if value is None or is_remote(value):
        return value
    return str(_home(config) / value)


def _home(config: pytest.Config) -> Path:
    """Return the folder that a relative path in the ini file is relative to."""
    return config.invocation_params.dir if config.inipath is None else config.inipath.parent


def _ini_options(config: pytest.Config) -> dict[str, object]:
    """Return the options of the ini file as a command line would give them, once all of them can be used."""
    options: dict[str, object] = {}
    for option in OPTIONS:
        if Edge.PYTEST_INI in option.absent:
            continue
        value = config.getini(Edge.PYTEST_INI.spell(option.name))
        if value is not None and value is not False:
            options[option.name] = _ini_value(config, option, value)
    parse(options, where=lambda name: _where(config, name))  # raises with the name of the ini option
    return options


def _ini_value(config: pytest.Config, option: Option, value: Any) -> object:
    """Return the value of an ini option as the command line would give it; paths are relative to the ini file."""
    if option.is_path and not value.startswith(_NO_PATH):
        path = _home(config) / value
        is_local = path.exists() or glob.has_magic(value)  # anything else may be an id of a hub
        return str(path) if is_local else value
    if option.name == "adapters":
        return [_ini_adapter(config, adapter) for adapter in value]
    if isinstance(value, list):
        return value if option.repeatable else ",".join(value)
    if isinstance(value, bool):
        return value
    try:
        return option.type(value)
    except ValueError:
        raise UsageError("not a number", where=_where(config, option.name), got=value) from None


def _ini_adapter(config: pytest.Config, adapter: str) -> str:
    """Return `NAME=PATH` with a path that is relative to the ini file made absolute."""
    name, sign, path = (part.strip() for part in adapter.partition("="))
    if path and (_home(config) / path).exists():
        path = str(_home(config) / path)
    return f"{name}{sign}{path}"


def _where(config: pytest.Config, name: str) -> str:
    """Return the name and the place of an ini option, for messages."""
    return f"{Edge.PYTEST_INI.spell(name)} in {config.inipath or '-o'}"
