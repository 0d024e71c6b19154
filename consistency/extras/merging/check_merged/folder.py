"""Open a folder of weights as any writer may leave it: its tensors by name, and the problems of its files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from consistency.capture.wording import counted, some
from consistency.case.checkpoint import DTYPES, Checkpoint, TensorHeader, read_header, read_json, read_model_weights
from consistency.errors import InputError
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.worker.model.weight_files import WeightFiles

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST = 4
_NAME_IN_INDEX = f"name its tensors in weight_map of {_INDEX}, or save the merged model again by save_pretrained()"

Severity = Literal["error", "warning", "note"]

_READING = threading.Lock()  # tensors are judged in several threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor that can be read.

    Attributes
    ----------
    name : str
        Its name.
    keys : tuple of str
        The names that it has in the files.
    shape, dtype : tuple of int, torch.dtype
        Of the values that `read` returns.
    read : callable
        Reads it.
    step : callable or None
        For a quantized tensor: given exact values, float64, how far quantizing them may be from each.
    codes : callable or None
        For a tensor in 8-bit floats: reads these, without their scales.
    variants : tuple of callable
        For a quantized tensor: read the values as other libraries than `read` round them on dequantizing.
    """

    name: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    step: Callable[[torch.Tensor], torch.Tensor] | None = None
    codes: Callable[[], torch.Tensor] | None = None
    variants: tuple[Callable[[], torch.Tensor], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of files or names, not of values.

    Attributes
    ----------
    todo : str
        What to do, where that is more than the cause says.
    """

    cause: MergeCause
    text: str
    tensors: tuple[str, ...] = ()
    severity: Severity = "error"
    todo: str = ""


@dataclass(slots=True, kw_only=True)
class Folder:
    """Tensors by name, the folder's settings, and problems of its files.

    Attributes
    ----------
    unread : dict of str to str
        Tensors that no library here reads, with the reason and what to do.
    reader : str
        What loads the folder, where that is not transformers: `llama.cpp`, `MLX`.
    """

    path: Path
    tensors: dict[str, Stored]
    config: Mapping[str, object]
    problems: list[Problem] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    reader: str = ""

    @property
    def ties(self) -> bool:
        """Return whether its config says that embedding and head are one."""
        # A model of several parts has a config for each of them within its own.
        tables = [self.config, *(table for table in self.config.values() if isinstance(table, dict))]
        stated = [table["tie_word_embeddings"] for table in tables if "tie_word_embeddings" in table]
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
        checkpoint = read_model_weights(path, allow_pickle=allow_pickle)
    else:
        checkpoint = _lenient_checkpoint(path, problems)
    files = WeightFiles(checkpoint, allow_pickle=allow_pickle)
    folder = path.parent if path.is_file() else path
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    tensors = {}
    for name in files.names():
        if (stored := _stored(name, files)) is not None:
            tensors[name] = stored
    unread = {
        name: f"dtype {header.dtype}, which torch does not have"
        for name, header in checkpoint.tensors.items()
        if name not in tensors
    }
    return Folder(path=path, tensors=tensors, config=config, problems=problems, unread=unread)


def _stored(name: str, files: WeightFiles) -> Stored | None:
    """Return a tensor of the files; None where torch has no such dtype."""
    header = files.header(name)
    if header is None:  # of a pickle
        dtype = files.read(name).dtype
    else:
        torch_dtype = getattr(torch, DTYPES.get(header.dtype, ""), None)
        if not isinstance(torch_dtype, torch.dtype):
            return None
        dtype = torch_dtype
    return Stored(
        name=name, keys=(name,), shape=files.shape(name), dtype=dtype, read=functools.partial(_read, files, name)
    )


def _read(files: WeightFiles, name: str) -> torch.Tensor:
    with _READING:  # which may map a file anew
        return files.read(name)


def _lenient_checkpoint(path: Path, problems: list[Problem]) -> Checkpoint:
    """Return the weights that transformers reads from a folder; add what is odd about its files to the problems."""
    shards = sorted(file for file in path.glob("*.safetensors") if file.name != "adapter_model.safetensors")
    adapter_files = [name for name in ("adapter_config.json", "adapter_model.safetensors") if (path / name).exists()]
    if adapter_files:
        verb = "lie" if len(adapter_files) > 1 else "lies"
        text = f"{' and '.join(adapter_files)} {verb} in the folder"
        problems.append(Problem(cause=MergeCause.ADAPTER_BESIDE, text=text))
    index: dict[str, str] = {}
    if (path / _WHOLE).exists():
        files = [path / _WHOLE]
    elif (path / _INDEX).exists():
        index = {str(name): str(file) for name, file in read_json(path / _INDEX)["weight_map"].items()}
        files = _files_of_index(path, index, problems)
    else:
        files = shards
        if len(shards) > 1 or (shards and shards[0].name.startswith("model-")):
            text = f"{counted(len(shards), 'shard')} and no {_INDEX}: transformers loads none of them"
            problems.append(Problem(cause=MergeCause.FILES, text=text))
    if not files:
        raise InputError(
            "the folder holds no weights of a model",
            where=path,
            got=", ".join(adapter_files) or "no shard",
            wanted=f"{_WHOLE}, or {_INDEX} and its shards",
            hint="an adapter alone was saved: merge it, and save the model",
        )
    stale = [file.name for file in shards if file not in files]
    if stale:
        text = f"transformers does not read {some(stale, _MOST)}, in the same folder"
        problems.append(Problem(cause=MergeCause.FILES, text=text, severity="warning"))
    tensors = _headers(files, index, problems)
    if index:
        _find_unlisted(path, stale, tensors, problems)
    # Where a problem names tensors already, those would be named again here.
    if not any(problem.tensors for problem in problems):
        unlisted = tuple(sorted(set(index) - set(tensors)))
        if unlisted:
            names = some(list(unlisted), _MOST)
            text = f"the index has {counted(len(unlisted), 'tensor')} that no shard holds: {names}"
            problems.append(Problem(cause=MergeCause.FILES, text=text, tensors=unlisted))
    return Checkpoint(folder=path, files=tuple(files), tensors=tensors)


def _find_unlisted(
    path: Path, stale: Sequence[str], tensors: Mapping[str, TensorHeader], problems: list[Problem]
) -> None:
    """Add a problem for each file whose tensors no file of the index holds."""
    for name in stale:
        unlisted = sorted(read_header(path / name).keys() - tensors.keys())
        if unlisted:
            text = (
                f"{name} holds {counted(len(unlisted), 'tensor')} that the index does not name, such as {unlisted[0]}"
            )
            problems.append(Problem(cause=MergeCause.FILES, text=text, tensors=tuple(unlisted), todo=_NAME_IN_INDEX))


def _files_of_index(path: Path, index: Mapping[str, str], problems: list[Problem]) -> list[Path]:
    """Return the files that an index names, those that are there; the absent ones are a problem."""
    names = sorted(set(index.values()))
    # A name with a folder in it could lead out of this folder: it counts as absent.
    files = [path / name for name in names if Path(name).name == name and (path / name).exists()]
    absent = sorted(set(names) - {file.name for file in files})
    if absent:
        lost = tuple(name for name, file in index.items() if file in absent)
        text = f"the index names {counted(len(absent), 'file')} that the folder lacks: {some(absent, _MOST)}"
        problems.append(Problem(cause=MergeCause.FILES, text=text, tensors=lost))
    return files


def _headers(files: Sequence[Path], index: Mapping[str, str], problems: list[Problem]) -> dict[str, TensorHeader]:
    """Return the headers of all tensors; one that is in two files is a problem, and taken from that of the index."""
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        headers = read_header(file)
        twice = tuple(sorted(headers.keys() & tensors.keys()))
        if twice:
            text = f"{counted(len(twice), 'tensor')} in two shards: {some(list(twice), _MOST)}"
            problems.append(Problem(cause=MergeCause.FILES, text=text, tensors=twice))
        for name, header in headers.items():
            is_listed_here = index.get(name, file.name) == file.name
            if name not in tensors or is_listed_here:
                tensors[name] = header
    return tensors


def as_matrices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the matrices of a tensor: of a stack, each one; of a vector, a column."""
    if tensor.dim() <= 1:
        yield tensor.reshape(-1, 1)
    elif tensor.dim() == 2:
        yield tensor
    else:
        yield from tensor.reshape(-1, *tensor.shape[-2:])
