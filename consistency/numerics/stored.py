"""Tensors as they lie in files, held against one another where their bytes differ."""

from __future__ import annotations

import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consistency.errors import InputError
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.diagnosis_moved import Known, diagnose_moved
from consistency.numerics.digest import as_bytes
from consistency.numerics.distance import Measure, measure
from consistency.numerics.dtype import name_of


def as_tensor(raw: np.ndarray, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """View bytes as a tensor; as plain bytes, `(n,)` uint8, where torch has no such dtype."""
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype):
        return _bytes(raw)
    if not len(raw):
        return torch.empty(shape, dtype=known)
    # a file's tensors start anywhere; numbers can be read only from a multiple of their own size
    size = known.itemsize // 2 if known.is_complex else known.itemsize
    return _bytes(raw if raw.ctypes.data % size == 0 else _moved(raw)).view(known).reshape(shape)


@contextmanager
def views_of_files() -> Iterator[None]:
    """Let threads view a file's bytes as tensors without a warning each that these cannot be written to: nothing does.

    To be entered once for all threads: what Python warns of is one setting for the whole process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        yield


def _bytes(raw: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(raw)


def _moved(raw: np.ndarray) -> np.ndarray:
    """Copy bytes to a file without a name, mapped into memory: a tensor of any size must not fill the memory."""
    with tempfile.TemporaryFile(prefix="consistency-diff-") as file:
        raw.tofile(file)
        file.flush()
        return np.memmap(file, np.uint8, mode="r").view(np.ndarray)


def measure_stored(
    actual: np.ndarray,
    expected: np.ndarray,
    *,
    shape: tuple[int, ...],
    dtype: str,
    other: Callable[[], str | None],
) -> tuple[Measure, Diagnosis]:
    """Measure two stored tensors of one shape and dtype, and name their difference.

    Parameters
    ----------
    actual, expected : np.ndarray
        Their bytes, uint8.
    shape : tuple of int
    dtype : str
    other : callable
        Name of another stored tensor with the same bytes, if there is one.
    """
    a, e = as_tensor(actual, shape, dtype), as_tensor(expected, shape, dtype)
    found = measure(a, e)
    return found, diagnose_moved(a, e, found, known=Known(swapped=lambda _: other()))


def read_pickle(file: Path) -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
    """Yield name, shape, dtype and bytes of each tensor of a pickle, read with `weights_only=True`.

    Tensors in dicts and lists inside it have the way to them in their name: `optimizer.state.0`.
    """
    try:
        # files from before torch 1.6 are no archives, and cannot be mapped
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # a spoilt pickle is a program that can go wrong in any way
        # torch's first sentences are on how to switch its guard off
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]
        reason = "it holds more than tensors" if reason.startswith("Weights only load failed") else reason
        raise InputError(
            "cannot read the pickle with weights_only=True", where=file, got=f"{type(error).__name__}: {_short(reason)}"
        ) from None
    if not isinstance(found, dict):
        raise InputError(
            "the pickle holds no state dict", where=file, got=type(found).__name__, wanted="a dict of tensors"
        )
    try:
        tensors = list(_tensors(found))
    except RecursionError:
        raise InputError("the pickle holds itself", where=file, wanted="a dict of tensors") from None
    for name, tensor in tensors:
        try:
            raw = as_bytes(tensor).numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:  # sparse, quantized, without storage
            raise InputError(f"{name} is no plain tensor", where=file, got=_short(str(error))) from None
        yield name, tuple(tensor.shape), name_of(tensor.dtype), raw


def _short(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:300]


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from _tensors(part, f"{name}.{key}" if name else str(key))
