"""The outputs of inference engines that a case is compared with: each with the name that reports give the engine.

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
    """The file of an engine's outputs, and the engine's name in reports."""

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
    several = [given] if isinstance(given, str) else given
    if isinstance(several, Mapping):
        pairs = [(str(name), str(path)) for name, path in several.items()]
    elif isinstance(several, (list, tuple)):
        pairs = [(one.name, one.path) if isinstance(one, EngineFile) else _pair(one, where) for one in several]
    else:
        raise UsageError("not the outputs of an engine", where=where, got=given, wanted=_WANTED)
    for name, path in pairs:
        if not _NAME.fullmatch(name) or not path.strip():
            got = f"{name}={path}"
            raise UsageError("not the outputs of an engine with a name", where=where, got=got, wanted=_WANTED)
        if name in {"auto", *BACKENDS}:
            raise UsageError(f"an engine cannot have the name of a device: {name}", where=where, wanted=_WANTED)
    twice = next((name for name, count in Counter(name for name, _ in pairs).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"two engines have the name {twice}", where=where)
    return tuple(EngineFile(name=name, path=path) for name, path in pairs)


def files_from(files: Sequence[EngineFile], home: Path) -> tuple[EngineFile, ...]:
    """Return files whose relative paths are relative to a folder, where they exist there."""
    return tuple(
        msgspec.structs.replace(one, path=str(home / one.path)) if (home / one.path).exists() else one for one in files
    )


def _pair(text: object, where: str) -> tuple[str, str]:
    name, equals, path = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not equals:
        raise UsageError("the outputs of an engine without a name", where=where, got=text, wanted=_WANTED)
    return name, path
