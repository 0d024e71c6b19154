"""A folder of weights as any writer may leave it: its tensors by name, and what is wrong with its files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from consistency.capture.wording import counted, some
from consistency.case.checkpoint import DTYPES, Checkpoint, TensorHeader, read_checkpoint, read_header, read_json
from consistency.errors import InputError
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.worker.model.weight_files import WeightFiles

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST = 4

Severity = Literal["error", "warning", "note"]

_READING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor that can be read: by its name, with the names that it has in the files.

    Attributes
    ----------
    step : callable or None
        Of one that is quantized: given exact values, float64, how far quantizing them may be from each.
    codes : callable or None
        Of one in 8-bit floats: these, without their scales.
    """

    name: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    step: Callable[[torch.Tensor], torch.Tensor] | None = None
    codes: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong that is about files or names, not about values."""

    cause: MergeCause
    text: str
    tensors: tuple[str, ...] = ()
    severity: Severity = "error"


@dataclass(slots=True, kw_only=True)
class Folder:
    """Tensors by name, the folder's settings, and problems of its files.

    Attributes
    ----------
    unread : dict of str to str
        Tensors that no library here reads, with the reason and what to do.
    """

    path: Path
    tensors: dict[str, Stored]
    config: Mapping[str, object]
    problems: list[Problem] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def ties(self) -> bool:
        """Return whether its config says that embedding and head are one."""
        tables = [self.config, *(one for one in self.config.values() if isinstance(one, dict))]
        stated = [one["tie_word_embeddings"] for one in tables if "tie_word_embeddings" in one]
        return bool(stated and stated[0])


def open_folder(path: Path, *, allow_pickle: bool, strict: bool) -> Folder:
    """Open a folder of weights, or one file of them.

    Parameters
    ----------
    strict : bool
        Raise where files are missing, as for a base; otherwise that is a problem of the folder.

    Raises
    ------
    InputError
        There are no weights, or they cannot be read.
    """
    problems: list[Problem] = []
    if path.is_file():
        checkpoint = Checkpoint(folder=path.parent, files=(path,), tensors=read_header(path))
    elif strict or not list(path.glob("*.safetensors")):
        checkpoint = read_checkpoint(path, stem="model", pickle_stem="pytorch_model", allow_pickle=allow_pickle)
    else:
        checkpoint = _as_found(path, problems)
    files = WeightFiles(checkpoint, allow_pickle=allow_pickle)
    folder = path.parent if path.is_file() else path
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    tensors = {name: stored for name in files.names() if (stored := _stored(name, files)) is not None}
    lost = {
        name: f"dtype {header.dtype}, which torch does not have"
        for name, header in checkpoint.tensors.items()
        if name not in tensors
    }
    return Folder(path=path, tensors=tensors, config=config, problems=problems, unread=lost)


def _stored(name: str, files: WeightFiles) -> Stored | None:
    header = files.header(name)
    if header is None:  # of a pickle
        dtype = files.read(name).dtype
    else:
        known = getattr(torch, DTYPES.get(header.dtype, ""), None)
        if not isinstance(known, torch.dtype):
            return None
        dtype = known
    return Stored(
        name=name, keys=(name,), shape=files.shape(name), dtype=dtype, read=functools.partial(_read, files, name)
    )


def _read(files: WeightFiles, name: str) -> torch.Tensor:
    with _READING:  # which may map a file anew
        return files.read(name)


def _as_found(path: Path, problems: list[Problem]) -> Checkpoint:
    """Return the weights that transformers reads from a folder, and what is odd about its files."""
    every = sorted(one for one in path.glob("*.safetensors") if one.name != "adapter_model.safetensors")
    beside = [name for name in ("adapter_config.json", "adapter_model.safetensors") if (path / name).exists()]
    if beside:
        text = f"{' and '.join(beside)} {'lie' if len(beside) > 1 else 'lies'} in the folder"
        problems.append(Problem(cause=MergeCause.ADAPTER_BESIDE, text=text))
    index: dict[str, str] = {}
    if (path / _WHOLE).exists():
        files = [path / _WHOLE]
    elif (path / _INDEX).exists():
        index = {str(name): str(file) for name, file in read_json(path / _INDEX)["weight_map"].items()}
        named = sorted(set(index.values()))
        files = [path / file for file in named if Path(file).name == file and (path / file).exists()]
        absent = sorted(set(named) - {file.name for file in files})
        if absent:
            lost = tuple(name for name, file in index.items() if file in absent)
            text = f"the index names {counted(len(absent), 'file')} that the folder lacks: {some(absent, _MOST)}"
            problems.append(Problem(cause=MergeCause.FILES, text=text, tensors=lost))
    else:
        files = every
        if len(every) > 1 or (every and every[0].name.startswith("model-")):
            text = f"{counted(len(every), 'shard')} and no {_INDEX}: transformers loads none of them"
            problems.append(Problem(cause=MergeCause.FILES, text=text))
    if not files:
        raise InputError(
            "the folder holds no weights of a model",
            where=path,
            got=", ".join(beside) or "no shard",
            wanted=f"{_WHOLE}, or {_INDEX} and its shards",
            hint="an adapter alone was saved: merge it, and save the model",
        )
    stale = [one.name for one in every if one not in files]
    if stale:
        text = f"transformers does not read {some(stale, _MOST)}, in the same folder"
        problems.append(Problem(cause=MergeCause.FILES, text=text, severity="warning"))
    tensors: dict[str, TensorHeader] = {}
    for file, headers in ((file, read_header(file)) for file in files):
        twice = tuple(sorted(headers.keys() & tensors.keys()))
        if twice:
            text = f"{counted(len(twice), 'tensor')} in two shards: {some(list(twice), _MOST)}"
            problems.append(Problem(cause=MergeCause.FILES, text=text, tensors=twice))
        listed = {name: one for name, one in headers.items() if index.get(name, file.name) == file.name}
        tensors |= {name: one for name, one in headers.items() if name not in tensors} | listed
    unlisted = tuple(sorted(set(index) - set(tensors))) if not any(p.tensors for p in problems) else ()
    if unlisted:
        text = f"the index has {counted(len(unlisted), 'tensor')} that no shard holds: {some(list(unlisted), _MOST)}"
        problems.append(Problem(cause=MergeCause.FILES, text=text, tensors=unlisted))
    return Checkpoint(folder=path, files=tuple(files), tensors=tensors)


def as_matrices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor as matrices: one of two dimensions, those of a stack; a vector is a column."""
    if tensor.dim() <= 1:
        yield tensor.reshape(-1, 1)
    else:
        yield from tensor.reshape(-1, *tensor.shape[-2:]) if tensor.dim() > 2 else (tensor,)
