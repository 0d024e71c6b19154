"""The file of `--groups`: for each host the groups that a site puts it in, such as `rack=r12, row=b`."""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from consistency.capture.folder import Capture, capture_name
from consistency.errors import UsageError

_WANTED = 'host,rack,row in the first line, and one host per line; or TOML: [gpu-0417] and rack = "r12"'


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteGroups:
    """The groups of the hosts of a site."""

    path: str = ""  # the file; empty where none was given
    # by host: values by name. A host may be missing, and so may any of its values.
    hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def of(self, capture: Capture) -> Mapping[str, str] | None:
        """Return the values of the host of a capture, None where the file does not name it.

        The file may name a host without its domain, or by the name of its capture, which is that of its node.
        """
        if not self.hosts:
            return None
        host = capture.manifest.host
        for name in (host, host.partition(".")[0], capture_name(capture.folder)):
            if name in self.hosts:
                return self.hosts[name]
        return None


NO_GROUPS = SiteGroups()


def read_site_groups(path: Path) -> SiteGroups:
    """Read the file: TOML if its name ends in `.toml`, else CSV.

    Raises
    ------
    UsageError
        The file cannot be read; the error names the line where that is known.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # as spreadsheets write it too
    except FileNotFoundError:
        raise UsageError("no such file", where=f"--groups {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot read the file of groups", where=f"--groups {path}", got=error) from None
    hosts = _from_toml(text, path) if path.suffix == ".toml" else _from_csv(text, path)
    if not hosts:
        raise UsageError("the file of groups names no host", where=f"--groups {path}", wanted=_WANTED)
    return SiteGroups(path=str(path), hosts=hosts)


def _from_csv(text: str, path: Path) -> dict[str, dict[str, str]]:
    """Return the values of each host by name; the first line that is not empty has the names."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    hosts: dict[str, dict[str, str]] = {}
    names: list[str] | None = None
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if names is None:
                names = cells[1:]
                are_distinct = len(set(names)) == len(names)
                if not names or not all(names) or not are_distinct:
                    raise _error("the first line has to name the groups, each once", path, reader.line_num, row)
                continue
            host, *values = cells
            # a value may be empty, but it may not be missing: the others would move to the wrong names
            if len(values) != len(names):
                raise _error(f"not as many values as names ({len(names)})", path, reader.line_num, row)
            if not host:
                raise _error("no host", path, reader.line_num, row)
            if host in hosts:
                raise _error("the host is named twice", path, reader.line_num, row)
            hosts[host] = {name: value for name, value in zip(names, values, strict=True) if value}
    except csv.Error as error:
        raise _error("not CSV", path, reader.line_num, [str(error)]) from None
    return hosts


def _error(problem: str, path: Path, line: int, row: list[str]) -> UsageError:
    """Return the error of one line, with the cells that are wrong."""
    return UsageError(problem, where=f"--groups {path}, line {line}", got=",".join(row), wanted=_WANTED)


def _from_toml(text: str, path: Path) -> dict[str, dict[str, str]]:
    """Return the values of each host by name; a host is a table."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError("the file of groups is not TOML", where=f"--groups {path}", got=error) from None
    hosts: dict[str, dict[str, str]] = {}
    for host, values in table.items():
        if not isinstance(values, dict) or not all(isinstance(value, (str, int)) for value in values.values()):
            # tomllib tells no line of a value: the first one that has the name is close enough
            line_number = next((n for n, line in enumerate(text.splitlines(), 1) if host in line), 1)
            raise _error("a host needs a table of texts or numbers", path, line_number, [f"{host} = {values}"])
        hosts[host] = {name: str(value) for name, value in values.items()}
    return hosts
