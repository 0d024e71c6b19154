"""The outputs of inference engines that a case is compared with: each file with the engine's name in reports.

`--engine-outputs vllm=./outputs.safetensors` on a command line, `engine_outputs = {vllm = "./outputs.safetensors"}` or
a list of `NAME=FILE` in TOML and Python.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from consistency.devices.backends import BACKENDS
from consistency.errors import UsageError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,60}")
_WANTED = "NAME=FILE, with a name of letters, digits, _, . and -"


class EngineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file with the outputs of an inference engine.

    Attributes
    ----------
    name : str
        Name of the engine in reports.
    path : str
        The safetensors file.
    """

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


def as_engine_files(given: object, *, where: str) -> tuple[EngineFile, ...]:
    """Return the files of a table of names and paths, or of a list of `NAME=FILE`.

    Raises
    ------
    UsageError
        A name is missing, given twice, that of a device, or none that a report can use.
    """
    files = [given] if isinstance(given, str) else given
    if isinstance(files, Mapping):
        pairs = [(str(name), str(path)) for name, path in files.items()]
    elif isinstance(files, (list, tuple)):
        pairs = [_name_and_path(item, where) for item in files]
    else:
        raise UsageError("not the outputs of an engine", where=where, got=given, wanted=_WANTED)
    for name, path in pairs:
        if not _NAME.fullmatch(name) or not path.strip():
            got = f"{name}={path}"
            raise UsageError("not the outputs of an engine with a name", where=where, got=got, wanted=_WANTED)
        if name in {"auto", *BACKENDS}:
            raise UsageError(f"an engine cannot have the name of a device: {name}", where=where, wanted=_WANTED)
    counts = Counter(name for name, _ in pairs)
    repeated_name = next((name for name, count in counts.items() if count > 1), None)
    if repeated_name is not None:
        raise UsageError(f"two engines have the name {repeated_name}", where=where)
    return tuple(EngineFile(name=name, path=path) for name, path in pairs)


def files_from(files: Sequence[EngineFile], home: Path) -> tuple[EngineFile, ...]:
    """Return the files with each path that exists in the folder `home` replaced by the path there."""
    resolved = []
    for file in files:
        path = home / file.path
        resolved.append(msgspec.structs.replace(file, path=str(path)) if path.exists() else file)
    return tuple(resolved)


def _name_and_path(item: object, where: str) -> tuple[str, str]:
    if isinstance(item, EngineFile):
        return item.name, item.path
    name, equals, path = item.partition("=") if isinstance(item, str) else ("", "", "")
    if not equals:
        raise UsageError("the outputs of an engine without a name", where=where, got=item, wanted=_WANTED)
    return name, path
