"""What decides results beside the weights: the config of the base, its files, and the code that makes it."""

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
    """Return the settings of a model's config that may change what it computes, by name; nothing where it has none.

    What JSON has not is named by its type: an address would be another one in each process.
    """
    found = getattr(getattr(model, "config", None), "to_dict", None)
    try:
        table = json.loads(json.dumps(found(), default=lambda value: type(value).__name__)) if callable(found) else {}
    except (TypeError, ValueError, RecursionError):
        return {}
    return dict(_settings(table))


def _settings(table: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if name not in _NO_RESULT and not name.startswith("_"):
            if isinstance(value, dict):
                yield from _settings(value, f"{within}{name}.")
            else:
                yield f"{within}{name}", value


def sources_of(case: Case) -> str:
    """Return a digest of the configs' files, and of the code of a factory, as far as this process has imported it."""
    total = hashlib.blake2b(digest_size=8)
    folders = (None if case.factory is not None else case.base, case.adapter)
    files = [Path(folder) / name for folder in folders if folder for name in ("config.json", "adapter_config.json")]
    for file in (*files, *(_code(case.factory) if case.factory is not None else ())):
        if file.is_file():
            total.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()


def _code(factory: str) -> Iterator[Path]:
    """Yield the file of a factory, and those of imported modules beside it: it may have its model from there."""
    name = factory.partition(":")[0]
    own = importlib.util.find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
    if own is None or own.origin is None or own.origin.startswith("<"):
        return
    folder = Path(own.origin).parent
    origins = {getattr(module, "__file__", None) for module in list(sys.modules.values())} | {own.origin}
    found = (Path(origin) for origin in origins if isinstance(origin, str))
    yield from sorted(file for file in found if file.parent == folder)
