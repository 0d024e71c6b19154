"""Tensors as they lie in files, held against one another where their bytes differ."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consistency.errors import InputError
from consistency.numerics.diagnosis import Diagnosis, Known, diagnose_moved
from consistency.numerics.digest import as_bytes
from consistency.numerics.distance import Measure, measure
from consistency.numerics.dtype import name_of


def as_tensor(raw: np.ndarray, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """View bytes as a tensor; as plain bytes, `(n,)` uint8, where torch has no such dtype."""
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype) or not len(raw):
        return torch.empty(shape, dtype=known) if isinstance(known, torch.dtype) else _bytes(raw)
    return _bytes(raw).view(known).reshape(shape)


def _bytes(raw: np.ndarray) -> torch.Tensor:
    if not len(raw):
        return torch.empty(0, dtype=torch.uint8)
    size = 8  # a file's tensors start anywhere; torch reads a dtype only from where it is aligned
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a file's bytes cannot be written to: nothing here writes
        return torch.from_numpy(raw if raw.ctypes.data % size == 0 else raw.copy())


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
    """Yield name, shape, dtype and bytes of each tensor of a pickle, read with `weights_only=True`."""
    try:
        # files from before torch 1.6 are no archives, and cannot be mapped
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise InputError("cannot read the pickle with weights_only=True", where=file, got=str(error)[:300]) from None
    if not isinstance(found, dict):
        raise InputError(
            "the pickle holds no state dict", where=file, got=type(found).__name__, wanted="a dict of tensors"
        )
    for name, tensor in found.items():
        if isinstance(tensor, torch.Tensor):
            yield str(name), tuple(tensor.shape), name_of(tensor.dtype), as_bytes(tensor).numpy()
