"""Map weight files into memory: where each tensor's bytes are. Nothing is read, and torch is not imported."""

from __future__ import annotations

import json
import math
import mmap
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from consistency.case.checkpoint import (
    DTYPES,
    read_checkpoint,
    read_header,
    read_index,
    read_model_weights,
    refuse_pickle,
)
from consistency.errors import InputError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a weight file; `dtype` is torch's name, and `raw`, uint8, is read from the file on access."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    raw: np.ndarray

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@contextmanager
def open_weights(path: Path, *, allow_pickle: bool = False) -> Iterator[Mapping[str, StoredTensor]]:
    """Map the weights of a file or folder into memory.

    Parameters
    ----------
    path : Path
        A safetensors file, an index of shards, or the folder of a model or an adapter.
    allow_pickle : bool
        Read a pickle, with `weights_only=True`, if there is nothing else.

    Raises
    ------
    InputError
        There are no weights, or they are a pickle, a Git LFS pointer, truncated or corrupt.
    """
    with ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {}
        files, pickled = _files(path, allow_pickle=allow_pickle)
        for file in files:
            tensors.update(_unpickled(file) if pickled else _mapped(file, stack))
        yield tensors


def _files(path: Path, *, allow_pickle: bool) -> tuple[tuple[Path, ...], bool]:
    """Return the weight files at a path, and whether they are pickles."""
    try:
        kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            "no such file or folder", where=path, wanted="a safetensors file, a model or an adapter"
        ) from None
    except OSError as error:
        raise InputError("cannot read the weights", where=path, got=error) from None
    if stat.S_ISDIR(kind):
        is_adapter = any(
            (path / f"adapter_{name}").exists() for name in ("config.json", "model.safetensors", "model.bin")
        )
        if is_adapter:
            checkpoint = read_checkpoint(
                path, stem="adapter_model", pickle_stem="adapter_model", allow_pickle=allow_pickle
            )
        else:
            checkpoint = read_model_weights(path, allow_pickle=allow_pickle)
        return checkpoint.files, checkpoint.pickled
    if not stat.S_ISREG(kind):  # a pipe or a device can be read only once, or never ends
        raise InputError("neither a file nor a folder", where=path, wanted="a file that can be mapped into memory")
    if path.suffix == ".json":
        checkpoint = read_index(path, allow_pickle=allow_pickle)
        return checkpoint.files, checkpoint.pickled
    if path.suffix in _PICKLES:
        refuse_pickle(path, wanted=f"{path.stem}.safetensors", allow_pickle=allow_pickle)
        return (path,), True
    return (path,), False


def _mapped(file: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    """Map a safetensors file, and return its tensors in the order of their data.

    The file is opened once for its headers and once for the mapping, so the header is read again from the mapping and
    compared: the file may have been replaced in between.
    """
    headers = read_header(file)  # safetensors itself checks the header, and that the data is complete
    handle = stack.enter_context(file.open("rb"))
    view = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    whole = np.frombuffer(view, np.uint8)  # keeps the mapping alive as long as anything refers to it
    start = 8 + int.from_bytes(view[:8], "little")
    entries: dict[str, Any] = json.loads(view[8:start])
    entries.pop("__metadata__", None)
    stop = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    mapped_structures = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items()}
    structures = {name: (header.shape, header.dtype) for name, header in headers.items()}
    # reading beyond a file's end kills the process
    if mapped_structures != structures or stop > len(view):
        raise InputError("the file was replaced while it was opened", where=file, hint="try again when it is complete")
    tensors = {}
    for name, header in sorted(headers.items(), key=lambda item: entries[item[0]]["data_offsets"]):
        first, last = entries[name]["data_offsets"]
        raw = whole[start + first : start + last]
        dtype = DTYPES.get(header.dtype, header.dtype)  # formats that torch does not know keep their own name
        tensors[name] = StoredTensor(name=name, shape=header.shape, dtype=dtype, raw=raw)
    return tensors


def _unpickled(file: Path) -> dict[str, StoredTensor]:
    """Read a pickle of tensors, which needs torch."""
    from consistency.numerics.stored import read_pickle

    tensors: dict[str, StoredTensor] = {}
    for name, shape, dtype, raw in read_pickle(file):
        if name in tensors:
            raise InputError(f"two tensors of one name: {name}", where=file)
        tensors[name] = StoredTensor(name=name, shape=shape, dtype=dtype, raw=raw)
    return tensors
