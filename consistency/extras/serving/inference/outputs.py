"""The file that an inference engine answers with: read and checked from its header alone, before a worker starts.

Shapes that only the model knows are checked where the outputs are judged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec
from safetensors import safe_open

from consistency.case.case import Case
from consistency.case.checkpoint import TensorHeader, read_header
from consistency.errors import InputError, did_you_mean
from consistency.extras.serving.inference.identity import CaseKey, adapter_digest, base_digest
from consistency.extras.serving.inference.request import METADATA, MODES, Mode

TOKENS, IDS = "tokens", "ids"
"""The tensor that says which places were computed, and the suffix of those with the ids of the largest values."""

FLOATS = ("F16", "BF16", "F32", "F64")
_INTEGERS = ("I64", "I32")
_FLAGS = ("BOOL", "U8")

_BATCH = re.compile(r"[0-9]{1,9}")  # rows: int() takes no more than 4300 digits
_HINT = "docs/engines/README.md describes the file"


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine says of itself and of its outputs."""

    schema: Literal["consistency.outputs/1"]
    case: CaseKey
    """Copied from the inputs."""
    engine: Annotated[str, msgspec.Meta(min_length=1)]
    version: str
    device: str
    dtype: Literal["float32", "bfloat16", "float16"]
    """Dtype that the engine computed in: of the weights, not of the file."""
    values: Literal["logits", "log_probabilities"] = "logits"
    """Logits, or natural logarithms of probabilities over the whole vocabulary."""
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of the largest values that are given of each place; None where all values are."""
    batch_invariant: bool = False
    """Whether the engine promises that a row's bits do not depend on the batch that it is in."""
    settings: dict[str, str] = {}
    """Further settings that the engine was run with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """An engine's outputs, whose data is not read yet."""

    path: Path
    about: About
    tensors: dict[str, TensorHeader]
    """Headers by the names of the tensors, which are `modes`, `batches`, `TOKENS`, and ids of the first two."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        return tuple(mode for mode in MODES if mode in self.tensors)

    @property
    def batches(self) -> tuple[str, ...]:
        """Return the names of the first row's outputs in several batches, the one where it is alone first."""
        names = [name for name in self.tensors if _is_batch(name)]
        return tuple(sorted(names, key=lambda name: (batch_size(name), name)))


def batch_name(size: int, place: Literal["first", "last"]) -> str:
    """Return the name of the first row's outputs in a batch: `batch.1` alone, then `batch.4.first`."""
    return "batch.1" if size == 1 else f"batch.{size}.{place}"


def batch_size(name: str) -> int:
    """Return the size of a batch, from the name of its outputs: 4 for `batch.4.first`."""
    return int(name.split(".")[1])


def read_outputs(path: Path) -> Outputs:
    """Read and check the header of an engine's outputs.

    Raises
    ------
    InputError
        It is no safetensors file or cut short, says nothing of its case or engine, holds a tensor that has no meaning
        here, or one whose dtype or shape does not fit the others.
    """
    if not path.is_file():
        raise InputError("no such file of an engine's outputs", where=path)
    tensors = read_header(path)
    outputs = Outputs(path=path, about=_about(path), tensors=tensors)
    if not outputs.modes:
        got = ", ".join(sorted(tensors)) or "no tensor"
        raise InputError(
            "the engine's outputs hold no outputs", where=path, got=got, wanted="one of " + ", ".join(MODES), hint=_HINT
        )
    for name, header in tensors.items():
        _check_tensor(outputs, name, header)
    shapes = {tensors[mode].shape[:-1] for mode in outputs.modes}
    if TOKENS in tensors:
        shapes.add(tensors[TOKENS].shape)
    if len(shapes) > 1:
        raise InputError(
            "the engine's outputs are of different rows or tokens",
            where=path,
            got=" and ".join(str(list(shape)) for shape in sorted(shapes)),
            wanted="one shape before the vocabulary",
            hint=f"computed places are marked in {TOKENS!r}; what is elsewhere is not read",
        )
    return outputs


def _about(path: Path) -> About:
    """Read the engine's description from the metadata of its file."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    text = metadata.get(METADATA)
    if text is None:
        raise InputError(
            "the engine's outputs do not say what they are",
            where=path,
            got="metadata " + (", ".join(sorted(metadata)) or "of no field"),
            wanted=f"a field {METADATA!r} with JSON",
            hint=_HINT,
        )
    try:
        return msgspec.json.decode(text, type=About)
    except msgspec.ValidationError as error:
        raise InputError(
            "the description of the engine's outputs cannot be used",
            where=f"{METADATA} in {path}",
            got=error,
            hint=_HINT,
        ) from None
    except msgspec.DecodeError as error:
        raise InputError(
            "the description of the engine's outputs is not JSON", where=f"{METADATA} in {path}", got=error, hint=_HINT
        ) from None


def _check_tensor(outputs: Outputs, name: str, header: TensorHeader) -> None:
    """Raise InputError where a tensor has a name without a meaning, or a dtype or shape that does not fit."""
    stem, _, suffix = name.rpartition(".")
    if name == TOKENS:
        _check_dtype(outputs, name, header, _FLAGS)
    elif suffix == IDS and stem in outputs.tensors:
        _check_ids(outputs, name, header, values=outputs.tensors[stem])
    else:
        _check_values(outputs, name, header)


def _check_ids(outputs: Outputs, name: str, header: TensorHeader, *, values: TensorHeader) -> None:
    """Raise InputError where ids do not fit the largest values that they belong to."""
    _check_dtype(outputs, name, header, _INTEGERS)
    if header.shape != values.shape:
        raise InputError(
            "ids of another shape than their values",
            where=f"{name} in {outputs.path}",
            got=list(header.shape),
            wanted=list(values.shape),
        )
    if outputs.about.top_k is None:
        raise InputError(
            "ids without top_k",
            where=f"{name} in {outputs.path}",
            wanted="how many of the largest values are given, as top_k",
            hint=_HINT,
        )


def _check_values(outputs: Outputs, name: str, header: TensorHeader) -> None:
    """Raise InputError where values of a mode or a batch cannot be used, or where the name is neither's."""
    if name not in MODES and not _is_batch(name):
        known = [*MODES, TOKENS, *(f"{mode}.{IDS}" for mode in MODES), "batch.1", "batch.2.first", "batch.2.last"]
        raise InputError(
            "a tensor that has no meaning here",
            where=f"{name} in {outputs.path}",
            wanted=", ".join(known),
            hint=did_you_mean(name, known) or _HINT,
        )
    _check_dtype(outputs, name, header, FLOATS)
    least_dimensions = 1 if _is_batch(name) else 2
    if len(header.shape) < least_dimensions:
        raise InputError(
            "outputs without a row or without a vocabulary",
            where=f"{name} in {outputs.path}",
            got=list(header.shape),
            wanted="[rows, tokens, vocabulary]",
        )
    if outputs.about.top_k is None:
        return
    if f"{name}.{IDS}" not in outputs.tensors:
        raise InputError(
            "the largest values without their ids",
            where=f"{name} in {outputs.path}",
            wanted=f"{name}.{IDS} of the same shape",
            hint=_HINT,
        )
    if header.shape[-1] < outputs.about.top_k:
        raise InputError(
            "fewer values than top_k",
            where=f"{name} in {outputs.path}",
            got=header.shape[-1],
            wanted=outputs.about.top_k,
        )


def _check_dtype(outputs: Outputs, name: str, header: TensorHeader, allowed: tuple[str, ...]) -> None:
    if header.dtype not in allowed:
        raise InputError(
            "a tensor of another dtype",
            where=f"{name} in {outputs.path}",
            got=header.dtype,
            wanted=" or ".join(allowed),
        )


def _is_batch(name: str) -> bool:
    """Report whether a name is one of `batch_name`."""
    parts = name.split(".")
    if parts == ["batch", "1"]:
        return True
    if len(parts) != 3:
        return False
    prefix, size, place = parts
    has_size = _BATCH.fullmatch(size) is not None and int(size) > 1
    return prefix == "batch" and has_size and place in ("first", "last")


def check_files_of(case: Case, outputs: Outputs) -> None:
    """Refuse outputs of another base or adapter, or of another dtype where the case names one.

    Raises
    ------
    InputError
    """
    about = outputs.about
    digests = (
        ("base", about.case.base, base_digest(case), case.base),
        ("adapter", about.case.adapter, adapter_digest(case), case.adapter),
    )
    for noun, got, wanted, folder in digests:
        if got != wanted:
            refuse(
                outputs,
                f"the engine's outputs are of another {noun}",
                got=f"{about.case.name}, {got or 'none'}",
                wanted=f"{folder or 'none'}, {wanted}",
            )
    check_dtype(outputs, None if case.dtype == "auto" else case.dtype)


def check_dtype(outputs: Outputs, dtype: str | None) -> None:
    """Refuse outputs of an engine that computed in another dtype than the case; None is one not known yet."""
    about = outputs.about
    if about.dtype != about.case.dtype:
        refuse(
            outputs,
            "the engine computed in another dtype than its inputs are for",
            got=about.dtype,
            wanted=about.case.dtype,
            hint=f"write the inputs with --dtype {about.dtype}",
        )
    if dtype is not None and about.dtype != dtype:
        refuse(
            outputs,
            "the engine computed in another dtype than the case",
            got=about.dtype,
            wanted=dtype,
            hint=f"run with --dtype {about.dtype}",
        )


def refuse(outputs: Outputs, what: str, *, got: object, wanted: object, hint: str | None = None) -> NoReturn:
    """Raise an error about a file of outputs."""
    raise InputError(
        what,
        where=outputs.path,
        got=got,
        wanted=wanted,
        hint=hint or "let the engine answer the inputs of this very case again",
    )
