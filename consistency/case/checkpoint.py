"""Names, shapes and dtypes of weight files, from safetensors headers: without torch, and without reading data."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from consistency.case.recognition import in_place_of_weights, missing_bytes, other_file
from consistency.errors import InputError

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""Torch's name of each dtype that a safetensors header can hold and torch has; others keep the name in the header."""

LFS_MARK = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor in a safetensors header."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The weight files of one folder; a pickle has no header, so its `tensors` are empty."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorHeader]
    pickled: bool = False


def read_json(path: Path, *, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a JSON object and check that it has the fields that `needed` names."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no {path.name} in the folder", where=path.parent, got=_listing(path.parent)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path.name}", where=path, got=error) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no JSONDecodeError
        refuse_lfs_pointer(path)
        raise InputError(f"{path.name} is not JSON", where=path, got=error) from None
    if not isinstance(table, dict):
        raise InputError(f"{path.name} is not a JSON object", where=path, got=type(table).__name__)
    missing = [key for key in needed if table.get(key) in (None, "", [], {})]
    if missing:
        raise InputError(
            f"{path.name} lacks the field {missing[0]!r}", where=path, got=", ".join(sorted(table)), wanted=missing
        )
    return table


_OF_DIFFUSERS = "diffusion_pytorch_model"
"""The name without ending of the weight files of diffusers, of safetensors and of pickles."""


def read_checkpoint(folder: Path, *, stem: str, pickle_stem: str, allow_pickle: bool) -> Checkpoint:
    """Find and check the weight files of a folder; the stems are names without ending: `model`, `pytorch_model`.

    Raises
    ------
    InputError
        No weights, a Git LFS pointer, a pickle that was not allowed, or a file that is cut short or corrupt.
    """
    whole, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if whole.exists():
        return Checkpoint(folder=folder, files=(whole,), tensors=read_header(whole))
    if index.exists():
        return read_index(index, allow_pickle=allow_pickle)
    pickle_names = (f"{pickle_stem}.bin", f"{pickle_stem}.bin.index.json")
    pickles = [folder / name for name in pickle_names if (folder / name).exists()]
    if not pickles:
        content, hint = in_place_of_weights(folder, whole.name)
        message = f"no weights: neither {whole.name} nor an index of shards"
        if content:
            message += f", but {content}"
        raise InputError(
            message,
            where=folder,
            got=_listing(folder),
            hint=hint,
        )
    refuse_pickle(pickles[0], wanted=whole.name, allow_pickle=allow_pickle)
    if pickles[0].suffix != ".bin":
        return read_index(pickles[0], allow_pickle=allow_pickle)
    return Checkpoint(folder=folder, files=(pickles[0],), tensors={}, pickled=True)


def read_model_weights(folder: Path, *, allow_pickle: bool) -> Checkpoint:
    """Find and check the weight files of a model of transformers, or of a part of a pipeline of diffusers.

    Raises
    ------
    InputError
        As of `read_checkpoint`.
    """
    if any(folder.glob(f"{_OF_DIFFUSERS}.*")) and not any(folder.glob("model.safetensors*")):
        return read_checkpoint(folder, stem=_OF_DIFFUSERS, pickle_stem=_OF_DIFFUSERS, allow_pickle=allow_pickle)
    return read_checkpoint(folder, stem="model", pickle_stem="pytorch_model", allow_pickle=allow_pickle)


def read_index(index: Path, *, allow_pickle: bool) -> Checkpoint:
    """Find and check the shards that an index names, of safetensors or of pickles.

    Raises
    ------
    InputError
        A shard is missing, damaged, or a pickle that was not allowed; or the index names tensors that no shard has.
    """
    folder = index.parent
    names = read_json(index, needed=("weight_map",))["weight_map"]
    # a name with a folder in it could lead out of this one
    if not isinstance(names, dict) or not all(_is_file_name(name) for name in names.values()):
        raise InputError("weight_map must map tensor names to files of the same folder", where=index)
    files = tuple(folder / name for name in sorted(set(names.values())))
    for file in files:
        if not file.exists():
            raise InputError(f"a shard is missing: {file.name}", where=index, got=_listing(folder))
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles:
        refuse_pickle(pickles[0], wanted=f"{pickles[0].stem}.safetensors", allow_pickle=allow_pickle)
        return Checkpoint(folder=folder, files=files, tensors={}, pickled=True)
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        tensors |= read_header(file)
    lost = sorted(set(names) - set(tensors))
    if lost:
        raise InputError(
            f"{len(lost)} tensors of the index are in no shard", where=index, got=lost[0], wanted=names[lost[0]]
        )
    return Checkpoint(folder=folder, files=files, tensors=tensors)


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return names, shapes and dtypes of a safetensors file, and check that its data is complete.

    Raises
    ------
    InputError
        It is a Git LFS pointer, another kind of file, cut short or corrupt.
    """
    refuse_lfs_pointer(path)
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
            return {
                name: TensorHeader(name=name, shape=tuple(part.get_shape()), dtype=part.get_dtype(), file=path)
                for name, part in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise _header_error(path, error) from None


def _header_error(path: Path, error: Exception) -> InputError:
    """Return the error for a file that safetensors cannot open: what it is instead, or how much of it is there."""
    with path.open("rb") as file:
        other = other_file(file.read(16))
    if other is not None:
        noun, hint = other
        return InputError(f"this is no safetensors file but {noun}", where=path, hint=hint)
    message = "the safetensors file is cut short or corrupt"
    hint = "copy or download the file again and compare its checksum with the source"
    # safetensors says so of a dtype that its version does not have
    if "unknown variant" in str(error):
        message += f", or has a dtype that safetensors {importlib.metadata.version('safetensors')} does not know"
        hint += ", or install a later safetensors"
    return InputError(
        message,
        where=path,
        got=f"{missing_bytes(path)}: {error}",
        wanted="a header, and data of the length that it declares",
        hint=hint,
    )


def refuse_pickle(path: Path, *, wanted: str, allow_pickle: bool) -> None:
    """Raise InputError for a pickle unless pickles are allowed; also for a Git LFS pointer in its place.

    `wanted` is the name of the safetensors file that should be there.
    """
    refuse_lfs_pointer(path)
    if allow_pickle:
        return
    raise InputError(
        f"the weights are a pickle ({path.name}), which can run code when it is read",
        where=path,
        wanted=wanted,
        hint=(
            'convert it: python -c "import sys, torch, safetensors.torch as s; '
            "s.save_file({k: v.contiguous().clone() for k, v in torch.load(sys.argv[1], "
            "weights_only=True, map_location='cpu').items()}, sys.argv[2], "
            "metadata={'format': 'pt'})\" "
            f"{shlex.quote(path.name)} {shlex.quote(wanted)}; or allow it with --allow-pickle, which reads with "
            "weights_only=True"
        ),
    )


def refuse_lfs_pointer(path: Path) -> None:
    """Raise InputError if a file cannot be read, or is a Git LFS pointer instead of its content."""
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError as error:
        raise InputError("cannot read the weights", where=path, got=error) from None
    if head.startswith(LFS_MARK):
        size = next((line[5:].decode() for line in head.splitlines() if line.startswith(b"size ")), "?")
        noun = "file" if path.suffix == ".json" else "weights"
        raise InputError(
            f"this is a Git LFS pointer, not the {noun}",
            where=path,
            got=f"{path.stat().st_size} bytes of text",
            wanted=f"the {size} bytes that it stands for",
            hint="run `git lfs install && git lfs pull` in that repository",
        )


def _is_file_name(value: object) -> bool:
    """Report whether a value names a file without any folder."""
    return isinstance(value, str) and Path(value).name == value


def _listing(folder: Path) -> str:
    """Return the names of the first files in a folder, for an error."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return "no such folder"
    listing = ", ".join(names[:8])
    if len(names) > 8:
        listing += " …"
    return listing or "an empty folder"
