"""What a pytest session is given: its command line, and below that its ini file."""

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

_NO_PATH = ("python:", "builtin:")
_ATTRIBUTES = {n: option.attribute for option in OPTIONS for n in (option.name, option.attribute)}
_OF_A_RUN = frozenset(inspect.signature(run).parameters) - {"case", "options"}


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
        file: Mapping[str, object] = {}
        if self.file is not None and gather_suite(self.file, {}, Edge.PYTEST) is None:
            file = read_options(self.file)
        where = {"history": self.history, "baseline": self.baseline}
        found = by_attribute(file) | by_attribute(self.options) | where
        return {name: value for name, value in found.items() if value is not None}


def by_attribute(options: Mapping[str, object], where: str = "") -> dict[str, Any]:
    """Return options by their names in Python; an option has one of them, whichever name it was given by.

    Raises
    ------
    UsageError
        There is no such option; `where` names the place.
    """
    for name in options:
        if name not in _ATTRIBUTES and name not in _OF_A_RUN:
            raise unknown_option(str(name), where)
    return {_ATTRIBUTES.get(name, name): value for name, value in options.items()}


def read_given(config: pytest.Config) -> Given:
    """Return what a session is given; a file that the command line names replaces the ini options of the case.

    Raises
    ------
    UsageError
        The value of an ini option cannot be used.
    """
    line = {option.name: config.getoption(f"consistency_{option.name}", None) for option in OPTIONS}
    file = config.getoption("consistency_config", None)
    own = dict[str, object]() if file is not None else _ini_options(config)
    if line["adapter"] is not None:  # one adapter and several take the place of each other
        own.pop("adapters", None)
    for option in OPTIONS:
        value = line[option.name]
        if value is not None:
            earlier = own.get(option.name)
            own[option.name] = [*earlier, *value] if option.repeatable and isinstance(earlier, list) else value
    file = file if file is not None else _ini_path(config, "config")
    out = config.getoption("consistency_out", None)
    baseline = config.getoption("consistency_baseline", None)
    return Given(
        file=None if file is None else Path(config.invocation_params.dir, file),
        options=own,
        out=_path(config, "out", out),
        history=config.getoption("consistency_history", None) or _ini_path(config, "history"),
        baseline=_path(config, "baseline", baseline),
        architectures=tuple(config.getoption("consistency_arch", None) or config.getini("consistency_arch") or ()),
    )


def _path(config: pytest.Config, name: str, given: str | None) -> Path | None:
    if given is not None:
        return Path(config.invocation_params.dir, given)
    found = _ini_path(config, name)
    return None if found is None else Path(found)


def _ini_path(config: pytest.Config, name: str) -> str | None:
    value = config.getini(f"consistency_{name}")
    return None if value is None else value if is_remote(value) else str(_home(config) / value)


def _home(config: pytest.Config) -> Path:
    """Return the folder that a relative path in the ini file is relative to."""
    return config.invocation_params.dir if config.inipath is None else config.inipath.parent


def _ini_options(config: pytest.Config) -> dict[str, object]:
    """Return the options of the ini file as a command line would give them, once all of them can be used."""
    found: dict[str, object] = {}
    for option in OPTIONS:
        if Edge.PYTEST_INI not in option.absent:
            value = config.getini(Edge.PYTEST_INI.spell(option.name))
            if value is not None and value is not False:
                found[option.name] = _ini_value(config, option, value)
    parse(found, where=lambda name: _where(config, name))
    return found


def _ini_value(config: pytest.Config, option: Option, value: Any) -> object:
    if option.is_path and not value.startswith(_NO_PATH):
        path = _home(config) / value
        return str(path) if path.exists() or glob.has_magic(value) else value
    if option.name == "adapters":
        pairs = [[part.strip() for part in one.partition("=")] for one in value]
        return ["".join((name, sign, _ini_adapter(config, path))) for name, sign, path in pairs]
    if isinstance(value, list):
        return value if option.repeatable else ",".join(value)
    if isinstance(value, bool):
        return value
    try:
        return option.type(value)
    except ValueError:
        raise UsageError("not a number", where=_where(config, option.name), got=value) from None


def _ini_adapter(config: pytest.Config, path: str) -> str:
    return str(_home(config) / path) if path and (_home(config) / path).exists() else path


def _where(config: pytest.Config, name: str) -> str:
    return f"{Edge.PYTEST_INI.spell(name)} in {config.inipath or '-o'}"
