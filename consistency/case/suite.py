"""Suites: many cases that share devices and workers, from one TOML file, a list of adapters, or a matrix of dtypes.

::

    base = "./llama"                # options at the top are those of every case
    devices = ["cpu", "cuda:0"]

    [[case]]
    adapter = "adapters/*"          # every folder with an adapter_config.json that matches
    dtype = ["float32", "bfloat16"] # each of them in each dtype

    [[case]]
    name = "reference"
    adapter = "reference"
    level = "thorough"
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from consistency.case.named_adapters import with_named_adapters
from consistency.case.options import Edge, Options, Source
from consistency.case.reading import layered, options_of, parse, read_table
from consistency.case.recognition import name_of
from consistency.errors import UsageError, did_you_mean

SHARED = ("devices", "timeout", "stall", "threads")
"""Options of the workers, which all cases share."""

_VARIES = ("adapter", "dtype")  # options that may have several values, each of which is a case
_ADAPTER_MARK = "adapter_config.json"
_NOT_IN_A_FOLDER = re.compile(r"[^\w.@+-]+")
_MOST_NAMES = 20  # one line of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """Everything that a user can set about a suite."""

    name: str
    shared: Options
    """Options of the workers, those in `SHARED`: they apply to all cases."""
    cases: tuple[Options, ...]
    """The options of each case. Their names differ, and so do the folders that are named after them."""

    def chosen(self, patterns: Sequence[str]) -> SuiteOptions:
        """Return the suite with only the cases whose name matches one of the patterns; without any, with all.

        Raises
        ------
        UsageError
            A pattern matches no case.
        """
        if not patterns:
            return self
        names = [str(case.name) for case in self.cases]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                wanted = ", ".join(names[:_MOST_NAMES])
                if len(names) > _MOST_NAMES:
                    wanted += ", …"
                hint = did_you_mean(pattern, names)
                raise UsageError("no case has such a name", where="--case", got=pattern, wanted=wanted, hint=hint)
        cases = [case for case in self.cases if any(fnmatchcase(str(case.name), pattern) for pattern in patterns)]
        return dataclasses.replace(self, cases=tuple(cases))


def gather_suite(config: str | Path | None, given: Mapping[str, object], edge: Edge) -> SuiteOptions | None:
    """Read a suite from a TOML file and a command line, which wins; None where they describe a single case.

    They describe a suite if the file has a `[[case]]`, or if an adapter is a pattern or a list, or a dtype is a list.
    Adapters with names (`NAME=PATH`) are several adapters of one case, and make no suite.
    """
    line = {name: value for name, value in given.items() if value is not None}
    line = with_named_adapters(line, where=edge.spell("adapter"))
    path = None if config is None else Path(config)
    file = {} if path is None else read_table(path)
    tables = _case_tables(file.pop("case", None), path)
    if tables is None and not any(_varies(file | line, name) for name in _VARIES):
        return None
    file_layer, line_layer = _Layer(file, path), _Layer(line, None, edge=edge)
    shared = layered(file_layer.shared(), line_layer.shared(), source=_source([file_layer, line_layer]))
    cases: list[Options] = []
    with_own_soak: set[int] = set()
    if tables is None:
        cases += _expanded([file_layer, line_layer], name=None)
    for number, table in enumerate(tables or (), start=1):
        table_layer = _Layer(table, path, f"[[case]] {number} of ")
        _refuse_shared(table_layer)
        first = len(cases)
        cases += _expanded([file_layer, table_layer, line_layer], name=table.get("name"))
        if "for" in table and "for" not in line:  # the option of `Options.soak`
            with_own_soak.update(range(first, len(cases)))
    suite = line.get("name", file.get("name")) or (path.stem if path is not None else "suite")
    return SuiteOptions(name=str(suite), shared=shared, cases=_check_names(_divide_soak(cases, with_own_soak)))


def _refuse_shared(layer: _Layer) -> None:
    """Raise UsageError for an option of all cases that stands in the table of one."""
    misplaced = next((name for name in SHARED if name in layer.table), None)
    if misplaced is not None:
        where = layer.where(misplaced)
        raise UsageError(f"{misplaced} is for all cases", where=where, hint="set it at the top of the file")


def _divide_soak(cases: Sequence[Options], with_own_soak: Container[int]) -> list[Options]:
    """Divide the time of a soak that is given for the whole suite over its cases.

    Cases with a time of their own, by number, keep it and take no part.
    """
    sharing = sum(number not in with_own_soak for number in range(len(cases)))
    divided = []
    for number, case in enumerate(cases):
        if number not in with_own_soak and case.soak is not None:
            case = dataclasses.replace(case, soak=case.soak / sharing)
        divided.append(case)
    return divided


def folder_name(name: str) -> str:
    """Return the name of the folder of a case: the case's name, without characters that a file name should not have."""
    return _NOT_IN_A_FOLDER.sub("-", name).strip("-.") or "case"


@dataclass(frozen=True, slots=True)
class _Layer:
    """Options from one place, as they are written there: the top of a file, a `[[case]]`, or a command line.

    `path` is the file, None for a command line; `part` precedes the file in the names of places.
    """

    table: Mapping[str, Any]
    path: Path | None
    part: str = ""
    edge: Edge = Edge.TOML

    def options(self, **chosen: object) -> dict[str, Any]:
        """Return the options as values, but for the name, and with the chosen adapter and dtype in place of lists."""
        table = {name: value for name, value in self.table.items() if name not in (*_VARIES, "name")}
        return self._parsed(table | chosen)

    def shared(self) -> dict[str, Any]:
        """Return the options of the workers as values."""
        return self._parsed({name: value for name, value in self.table.items() if name in SHARED})

    def where(self, name: str) -> str:
        """Return the place of an option in an error: `adapter in [[case]] 2 of suite.toml`, or `--adapter`."""
        return self.edge.spell(name) if self.path is None else f"{name} in {self.part}{self.path}"

    def _parsed(self, table: Mapping[str, Any]) -> dict[str, Any]:
        if self.path is None:
            return parse(table, where=self.edge.spell)
        return options_of(table, self.path, part=self.part)

    def values(self, name: str) -> list[Any]:
        """Return the values of an option that may be a list; a pattern gives the adapters that match it."""
        value = self.table[name]
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise UsageError(f"no {name} given", where=self.where(name), wanted=f"one {name} at least")
        values: list[Any] = []
        for item in items:
            values += self._matches(item) if _is_pattern(item) else [item]
        return values

    def _matches(self, pattern: str) -> list[str]:
        """Return the folders of adapters that match a pattern, which is relative to the file.

        Raises
        ------
        UsageError
            There is no such folder.
        """
        home = Path() if self.path is None else self.path.parent
        absolute = (home / Path(pattern).expanduser()).absolute()
        # `glob` takes no absolute pattern
        paths = Path(absolute.anchor).glob(str(absolute.relative_to(absolute.anchor)))
        adapters = sorted(path for path in paths if (path / _ADAPTER_MARK).is_file())
        if not adapters:
            raise UsageError(
                "no adapter matches the pattern",
                where=self.where("adapter"),
                got=pattern,
                wanted=f"folders with {_ADAPTER_MARK}",
            )
        return [str(path) for path in adapters]


def _case_tables(tables: object, path: Path | None) -> list[dict[str, Any]] | None:
    """Return the tables `[[case]]` of a file; None where it has none. Raise UsageError where `case` is no such list."""
    if tables is None:
        return None
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UsageError("case is not a list of tables", where=f"case in {path}", wanted="[[case]]")
    return tables


def _is_pattern(value: object) -> bool:
    """Return whether a value is a pattern, and no folder with such characters in its name."""
    return isinstance(value, str) and glob.has_magic(value) and not Path(value).is_dir()


def _varies(table: Mapping[str, Any], name: str) -> bool:
    """Return whether an option of a table stands for several cases."""
    value = table.get(name)
    return isinstance(value, (list, tuple)) or (name == "adapter" and _is_pattern(value))


def _expanded(layers: Sequence[_Layer], *, name: object) -> Iterator[Options]:
    """Yield the cases of one table: one per adapter and dtype. `name` is the name in the table, None without one."""
    adapter_layer, dtype_layer = (_last_with(option, layers) for option in _VARIES)
    adapters = [None] if adapter_layer is None else adapter_layer.values("adapter")
    dtypes = [None] if dtype_layer is None else dtype_layer.values("dtype")
    adapters_vary = adapter_layer is not None and _varies(adapter_layer.table, "adapter")
    dtypes_vary = dtype_layer is not None and _varies(dtype_layer.table, "dtype")
    labels = _labels([adapter for adapter in adapters if isinstance(adapter, str)])
    for adapter, dtype in itertools.product(adapters, dtypes):
        tables = []
        for layer in layers:
            # each value goes into the layer that it comes from: a path in a file is relative to that file
            picked: dict[str, object] = {}
            if layer is adapter_layer:
                picked["adapter"] = adapter
            if layer is dtype_layer:
                picked["dtype"] = dtype
            tables.append(layer.options(**picked))
        options = layered(*tables, source=_source(layers))
        parts = [] if name is None else [str(name)]
        if adapters_vary or name is None:
            parts.append(labels.get(str(adapter), ""))
        if dtypes_vary:
            parts.append(str(dtype))
        case_name = "-".join(filter(None, parts)) or name_of(Path(options.base or "base"))
        yield dataclasses.replace(options, name=case_name)


def _last_with(option: str, layers: Sequence[_Layer]) -> _Layer | None:
    """Return the layer that decides an option: the last one that has it."""
    return next((layer for layer in reversed(layers) if option in layer.table), None)


def _source(layers: Sequence[_Layer]) -> Source:
    """Return where the options of some layers were given; the last layer is the command line's."""
    line = layers[-1]
    places: dict[str, str] = {}
    for layer in layers:
        if layer.path is not None:
            places |= {name: layer.where(name) for name in layer.table}
    return Source(edge=line.edge, places={name: place for name, place in places.items() if name not in line.table})


def _labels(adapters: Sequence[str]) -> dict[str, str]:
    """Return a name for each adapter: its folder's, or the path below all of them where several have the same name."""
    names = {path: name_of(Path(path)) for path in adapters}
    if len(set(names.values())) == len(names):
        return names
    paths = {path: Path(path).expanduser().absolute() for path in adapters}
    common = os.path.commonpath(list(paths.values()))
    return {path: "-".join(whole.relative_to(common).parts) for path, whole in paths.items()}


def _check_names(cases: Sequence[Options]) -> tuple[Options, ...]:
    """Return the cases; raise UsageError where two would have the same folder."""
    counts = Counter(folder_name(str(case.name)) for case in cases)
    repeated_name = next((str(case.name) for case in cases if counts[folder_name(str(case.name))] > 1), None)
    if repeated_name is not None:
        hint = "give each [[case]] a name"
        raise UsageError("two cases have the same name", where="name", got=repeated_name, hint=hint)
    return tuple(cases)
