"""Which case a file for an inference engine, or one of its outputs, belongs to.

Digests of everything that the outputs depend on: a file of another case is refused by the part that differs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import msgspec

from consistency.case.case import Case
from consistency.case.checkpoint import Checkpoint, read_checkpoint
from consistency.case.recognition import ADAPTER_CONFIG, BASE_CONFIG

_WHOLE_BYTES = 1 << 24
"""Files up to this size are digested whole, which takes some 10 ms: every adapter of usual rank."""

_SAMPLES = 256
_SAMPLE_BYTES = 4096
"""Number and size of the pages, at equal distances, that are digested of a larger file; hashing all of a large base
would take minutes from a cold disk. What matters here is which files they are: the stage `base` compares every byte on
a device."""

_FIELDS_OF_ORIGIN = frozenset({"_name_or_path", "base_model_name_or_path", "transformers_version", "peft_version"})
"""Fields of a config that say where a file came from, and change no output."""


class CaseKey(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a case to an engine: written with its inputs, and copied unchanged to its outputs."""

    name: str
    """Name of the case, for people."""
    inputs: str
    """Digest of the fixed inputs."""
    base: str
    adapter: str
    """`base`, `adapter`: digests of the config, the header and the data of the files; `adapter` is empty where the case
    has none."""
    dtype: Annotated[str, msgspec.Meta(pattern="^(auto|float64|float32|bfloat16|float16)$")]
    """Dtype that the base is loaded in."""


def base_digest(case: Case) -> str:
    """Return a digest of the base's files; of a base that a function makes, of the function's name."""
    if case.factory is not None:
        return _short(hashlib.blake2b(case.base.encode()))
    folder = Path(case.base)
    weights = read_checkpoint(folder, stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle)
    return _digest(folder / BASE_CONFIG, weights)


def adapter_digest(case: Case) -> str:
    """Return a digest of the adapter's files, empty where the case has none."""
    if case.adapter is None:
        return ""
    folder = Path(case.adapter)
    weights = read_checkpoint(folder, stem="adapter_model", pickle_stem="adapter_model", allow_pickle=case.allow_pickle)
    return _digest(folder / ADAPTER_CONFIG, weights)


def _digest(config: Path, weights: Checkpoint) -> str:
    """Return a digest of a config and weight files: of small files whole, of large ones by pages at equal distances."""
    hashed = hashlib.blake2b()
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields = {name: value for name, value in fields.items() if name not in _FIELDS_OF_ORIGIN}
    hashed.update(json.dumps(fields, sort_keys=True).encode())
    for path in weights.files:
        size = path.stat().st_size
        hashed.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                hashed.update(file.read())
                continue
            for number in range(_SAMPLES):  # the first page has the header, the last one ends the file
                file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                hashed.update(file.read(_SAMPLE_BYTES))
    return _short(hashed)


def _short(hashed: hashlib.blake2b) -> str:
    return hashed.hexdigest()[:32]
