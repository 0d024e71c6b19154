"""Measure and diagnose tensors in files whose bytes differ."""

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
from consistency.numerics.diagnosis_moved import OtherContents, diagnose_moved
from consistency.numerics.digest import as_bytes
from consistency.numerics.distance import measure
from consistency.numerics.dtype import name_of
from consistency.numerics.measure import Measure

_AT_ONCE = 1 << 22
"""Elements that are compared at once: a large tensor must not fill the memory."""


def as_tensor(raw: np.ndarray, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """View bytes as a tensor; as plain bytes, `(n,)` uint8, if torch has no such dtype."""
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        return torch.from_numpy(raw)
    if not len(raw):
        return torch.empty(shape, dtype=torch_dtype)
    # a file's tensors start at any address; torch reads elements only at multiples of their size
    size = torch_dtype.itemsize // 2 if torch_dtype.is_complex else torch_dtype.itemsize
    aligned = raw if raw.ctypes.data % size == 0 else _moved(raw)
    return torch.from_numpy(aligned).view(torch_dtype).reshape(shape)


@contextmanager
def views_of_files() -> Iterator[None]:
    """Suppress the warning that tensors on mapped files are read-only: nothing writes to them.

    Enter it once for all threads: warning filters are global to the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        yield


def _moved(raw: np.ndarray) -> np.ndarray:
    """Copy bytes to an unnamed file, mapped into memory: a large tensor must not fill the memory."""
    with tempfile.TemporaryFile(prefix="consistency-diff-") as file:
        raw.tofile(file)
        file.flush()
        return np.memmap(file, np.uint8, mode="r").view(np.ndarray)


def measure_stored(
    actual: np.ndarray, expected: np.ndarray, *, shape: tuple[int, ...], dtype: str, other: Callable[[], str | None]
) -> tuple[Measure, Diagnosis]:
    """Measure two stored tensors of one shape and dtype, given as uint8, and diagnose their difference.

    `other` returns the name of another stored tensor with the same bytes as `actual`, if there is one.
    """
    a, e = as_tensor(actual, shape, dtype), as_tensor(expected, shape, dtype)
    distance = measure(a, e)
    return distance, diagnose_moved(a, e, distance, other_contents=OtherContents(swapped=lambda _: other()))


def count_not_rounded(actual: np.ndarray, dtype: str, expected: np.ndarray, expected_dtype: str) -> int | None:
    """Return how many elements differ from the elements of another stored tensor, rounded to nearest in this dtype.

    Both are given as uint8; None where torch does not know a dtype, or one of them is not of floating-point numbers.
    """
    size, expected_size = _float_size(dtype), _float_size(expected_dtype)
    if size is None or expected_size is None:
        return None
    count = 0
    for start in range(0, len(actual) // size, _AT_ONCE):
        a = _elements_from(actual, start, size, dtype)
        e = _elements_from(expected, start, expected_size, expected_dtype)
        same = as_bytes(a).view(-1, size) == as_bytes(e.to(a.dtype)).view(-1, size)
        count += int((~same.all(dim=1)).sum())
    return count


def _float_size(name: str) -> int | None:
    """Return the bytes of an element of a floating-point dtype; None for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return dtype.itemsize


def _elements_from(raw: np.ndarray, start: int, size: int, dtype: str) -> torch.Tensor:
    """View the `_AT_ONCE` elements of `size` bytes from number `start` on, fewer at the end, as a flat tensor."""
    part = raw[start * size : (start + _AT_ONCE) * size]
    return as_tensor(part, (len(part) // size,), dtype)


def read_pickle(file: Path) -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
    """Yield name, shape, dtype and bytes of each tensor of a pickle, read with `weights_only=True`.

    Tensors in nested dicts and lists have the path in their name: `optimizer.state.0`.
    """
    try:
        # files from before torch 1.6 are not archives, and cannot be mapped
        contents: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # a damaged pickle can raise anything
        # torch's first sentences explain how to disable its check
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]
        if reason.startswith("Weights only load failed"):
            reason = "it contains more than tensors"
        raise InputError(
            "cannot read the pickle with weights_only=True", where=file, got=f"{type(error).__name__}: {_short(reason)}"
        ) from None
    if not isinstance(contents, dict):
        raise InputError(
            "the pickle contains no state dict", where=file, got=type(contents).__name__, wanted="a dict of tensors"
        )
    try:
        tensors = list(_tensors(contents))
    except RecursionError:
        raise InputError("the pickle contains itself", where=file, wanted="a dict of tensors") from None
    for name, tensor in tensors:
        try:
            raw = as_bytes(tensor).numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:  # sparse, quantized, without storage
            raise InputError(f"{name} is not a plain tensor", where=file, got=_short(str(error))) from None
        yield name, tuple(tensor.shape), name_of(tensor.dtype), raw


def _short(message: str) -> str:
    """Return the first line of a message, cut to 300 characters."""
    return next(iter(message.strip().splitlines()), "")[:300]


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts and lists with their paths; anything else is left out."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, element in items:
            path = f"{name}.{key}" if name else str(key)
            yield from _tensors(element, path)
