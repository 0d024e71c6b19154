"""Describe what decides results beside the weights: the config of the base, its files, and the code that makes it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consistency.case.case import Case

_NO_RESULT = frozenset((
    "transformers_version", "torch_dtype", "dtype", "id2label", "label2id", "architectures", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "initializer_range", "problem_type", "model_type", "pretraining_tp",
))  # fmt: skip
"""Fields on which no value of a forward pass depends: origin, how it was saved, names of labels, forms of output."""


def config_of(model: Any) -> dict[str, Any]:
    """Return the settings of a model's config that may change its results, by name; empty where it has no config.

    A value that JSON does not know is named by its type: an address would be another one in each process.
    """
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if not callable(to_dict):
        return {}
    try:
        table = json.loads(json.dumps(to_dict(), default=lambda value: type(value).__name__))
    except (TypeError, ValueError, RecursionError):
        return {}
    return dict(_settings(table))


def _settings(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting that may change results; names within tables are joined by dots."""
    for name, value in table.items():
        if name in _NO_RESULT or name.startswith("_"):
            continue
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def sources_of(case: Case) -> str:
    """Return a digest of the configs' files, and of the code of a factory, as far as this process has imported it."""
    hasher = hashlib.blake2b(digest_size=8)
    for file in _source_files(case):
        if file.is_file():
            hasher.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return hasher.hexdigest()


def _source_files(case: Case) -> Iterator[Path]:
    """Yield the configs of base and adapter, which may not exist, and the files of a factory's code."""
    base = None if case.factory is not None else case.base
    for folder in (base, case.adapter):
        if folder:
            yield Path(folder) / "config.json"
            yield Path(folder) / "adapter_config.json"
    if case.factory is not None:
        yield from _code_files(case.factory)


def _code_files(factory: str) -> list[Path]:
    """Return the file of a factory, and those of imported modules beside it: it may have its model from there."""
    name = factory.partition(":")[0]
    spec = importlib.util.find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
    if spec is None or spec.origin is None or spec.origin.startswith("<"):
        return []
    folder = Path(spec.origin).parent
    origins = {getattr(module, "__file__", None) for module in list(sys.modules.values())} | {spec.origin}
    files = (Path(origin) for origin in origins if isinstance(origin, str))
    return sorted(file for file in files if file.parent == folder)
