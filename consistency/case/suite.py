"""A SUITE: many cases that share devices and workers, from one TOML file, a list of adapters, or a matrix of dtypes.

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

_VARIES = ("adapter", "dtype")
_ADAPTER_MARK = "adapter_config.json"
_NOT_IN_A_FOLDER = re.compile(r"[^\w.@+-]+")
_MOST_NAMES = 20  # one line of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """What a user can set about a suite."""

    name: str
    shared: Options
    """Those in `SHARED` apply to all cases."""
    cases: tuple[Options, ...]
    """Their names differ, and so do the folders that are named after them."""

    def chosen(self, patterns: Sequence[str]) -> SuiteOptions:
        """Return the suite with those cases alone whose name matches one of the patterns; without any, with all.

        Raises
        ------
        UsageError
            A pattern matches none.
        """
        if not patterns:
            return self
        names = [str(case.name) for case in self.cases]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                more = ", …" if len(names) > _MOST_NAMES else ""
                wanted = ", ".join(names[:_MOST_NAMES]) + more
                hint = did_you_mean(pattern, names)
                raise UsageError("no case has such a name", where="--case", got=pattern, wanted=wanted, hint=hint)
        cases = [case for case in self.cases if any(fnmatchcase(str(case.name), pattern) for pattern in patterns)]
        return dataclasses.replace(self, cases=tuple(cases))


def gather_suite(config: str | Path | None, given: Mapping[str, object], edge: Edge) -> SuiteOptions | None:
    """Read a suite from a TOML file and a command line, which wins; None where they describe a single case.

    They describe a suite if the file has a `[[case]]`, or if an adapter is a pattern or a list, or a dtype is a list.
    Adapters with names are several of one case.
    """
    own = with_named_adapters({n: v for n, v in given.items() if v is not None}, where=edge.spell("adapter"))
    path = None if config is None else Path(config)
    file = {} if path is None else read_table(path)
    tables = _case_tables(file.pop("case", None), path)
    if tables is None and not any(_varies(file | own, name) for name in _VARIES):
        return None
    top, given_last = _Layer(file, path), _Layer(own, None, edge=edge)
    shared = layered(top.shared(), given_last.shared(), source=_source([top, given_last]))
    cases: list[Options] = []
    own_time: set[int] = set()
    for number, table in enumerate(tables or [{}], start=1):
        part = f"[[case]] {number} of " if tables else ""
        misplaced = [name for name in SHARED if tables and name in table]
        if misplaced:
            where = f"{misplaced[0]} in {part}{path}"
            raise UsageError(f"{misplaced[0]} is for all cases", where=where, hint="set it at the top of the file")
        layers = [_Layer(file, path), _Layer(table, path, part), _Layer(own, None, edge=edge)]
        if tables is None:
            layers = [layers[0], layers[2]]
        before = len(cases)
        cases += _expanded(layers, name=table.get("name"))
        if "for" in table and "for" not in own:
            own_time.update(range(before, len(cases)))
    suite = own.get("name", file.get("name")) or (path.stem if path is not None else "suite")
    return SuiteOptions(name=str(suite), shared=shared, cases=_named_apart(_time_divided(cases, own_time)))


def _time_divided(cases: Sequence[Options], own: Container[int]) -> list[Options]:
    """Divide a soak that is given for the whole suite over its cases, except those that have a time of their own."""
    sharing = sum(number not in own for number in range(len(cases)))
    return [
        one if number in own or one.soak is None else dataclasses.replace(one, soak=one.soak / sharing)
        for number, one in enumerate(cases)
    ]


def folder_name(name: str) -> str:
    """Return the name of the folder of a case."""
    return _NOT_IN_A_FOLDER.sub("-", name).strip("-.") or "case"


@dataclass(frozen=True, slots=True)
class _Layer:
    """Options from one place, as they are written there."""

    table: Mapping[str, Any]
    path: Path | None
    part: str = ""
    edge: Edge = Edge.TOML

    def options(self, **chosen: object) -> dict[str, Any]:
        """Return the options as values, but for the name, and with one adapter and one dtype."""
        kept = {name: value for name, value in self.table.items() if name not in (*_VARIES, "name")} | chosen
        return self._parsed(kept)

    def shared(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.table.items() if name in SHARED}
        return self._parsed(kept)

    def where(self, name: str) -> str:
        return self.edge.spell(name) if self.path is None else f"{name} in {self.part}{self.path}"

    def _parsed(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        return parse(kept, where=self.edge.spell) if self.path is None else options_of(kept, self.path, part=self.part)

    def values(self, name: str) -> list[Any]:
        """Return the values of an option that may be a list, and the adapters that match a pattern."""
        given = self.table[name]
        found = list(given) if isinstance(given, (list, tuple)) else [given]
        if not found:
            raise UsageError(f"no {name} given", where=self.where(name), wanted=f"one {name} at least")
        return [one for value in found for one in (self._matches(value) if _is_pattern(value) else [value])]

    def _matches(self, pattern: str) -> list[str]:
        home = Path() if self.path is None else self.path.parent
        whole = (home / Path(pattern).expanduser()).absolute()
        found = Path(whole.anchor).glob(str(whole.relative_to(whole.anchor)))
        adapters = sorted(path for path in found if (path / _ADAPTER_MARK).is_file())
        if not adapters:
            raise UsageError(
                "no adapter matches the pattern",
                where=self.where("adapter"),
                got=pattern,
                wanted=f"folders with {_ADAPTER_MARK}",
            )
        return [str(path) for path in adapters]


def _case_tables(found: object, path: Path | None) -> list[dict[str, Any]] | None:
    if found is None:
        return None
    if not isinstance(found, list) or not found or not all(isinstance(table, dict) for table in found):
        raise UsageError("case is not a list of tables", where=f"case in {path}", wanted="[[case]]")
    return found


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) and glob.has_magic(value) and not Path(value).is_dir()


def _varies(table: Mapping[str, Any], name: str) -> bool:
    value = table.get(name)
    return isinstance(value, (list, tuple)) or (name == "adapter" and _is_pattern(value))


def _expanded(layers: Sequence[_Layer], *, name: object) -> Iterator[Options]:
    """Yield the cases of one table: one per adapter and dtype."""
    chosen = {option: next((one for one in reversed(layers) if option in one.table), None) for option in _VARIES}
    values = {option: [None] if one is None else one.values(option) for option, one in chosen.items()}
    varied = {option for option, one in chosen.items() if one is not None and _varies(one.table, option)}
    labels = _labels([value for value in values["adapter"] if isinstance(value, str)])
    for adapter in values["adapter"]:
        for dtype in values["dtype"]:
            picked = {"adapter": adapter, "dtype": dtype}
            of_layers = [
                one.options(**{option: picked[option] for option in _VARIES if chosen[option] is one}) for one in layers
            ]
            options = layered(*of_layers, source=_source(layers))
            own = labels.get(str(adapter), "") if "adapter" in varied or name is None else ""
            parts = [str(name) if name is not None else "", own, dtype if "dtype" in varied else ""]
            text = "-".join(part for part in parts if part) or name_of(Path(options.base or "base"))
            yield dataclasses.replace(options, name=text)


def _source(layers: Sequence[_Layer]) -> Source:
    places = {name: layer.where(name) for layer in layers for name in layer.table if layer.path is not None}
    return Source(edge=layers[-1].edge, places={n: place for n, place in places.items() if n not in layers[-1].table})


def _labels(adapters: Sequence[str]) -> dict[str, str]:
    """Return a name for each adapter: that of its folder; where several have that, the path below all of them."""
    names = {path: name_of(Path(path)) for path in adapters}
    if len(set(names.values())) == len(names):
        return names
    whole = {path: Path(path).expanduser().absolute() for path in adapters}
    above = os.path.commonpath(list(whole.values()))
    return {path: "-".join(one.relative_to(above).parts) for path, one in whole.items()}


def _named_apart(cases: Sequence[Options]) -> tuple[Options, ...]:
    counts = Counter(folder_name(str(case.name)) for case in cases)
    twice = next((str(case.name) for case in cases if counts[folder_name(str(case.name))] > 1), None)
    if twice is not None:
        raise UsageError("two cases have the same name", where="name", got=twice, hint="give each [[case]] a name")
    return tuple(cases)
