"""Cut the tensors of a finding to a few bytes that still show the fault."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

MOST_BYTES = 8 * 2**20
"""All tensors of a folder together: with its scripts it stays under 10 MB, which issue trackers accept."""


def cut_moved(tensors: Mapping[str, torch.Tensor], worst: Sequence[int] | None) -> tuple[dict[str, torch.Tensor], str]:
    """Cut tensors of one shape to a range of elements around the worst one.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        `expected`, and `actual` if it was stored.
    worst : sequence of int or None
        Index of the worst element.

    Returns
    -------
    dict of str to torch.Tensor
        Unchanged if they fit, else `(elements,)`.
    str
        Which part of the whole they are.
    """
    found, start = cut_results(tensors, worst)
    if start is None:
        return found, f"whole, shape {tuple(tensors['expected'].shape)}"
    end = start + found["expected"].numel()
    return found, f"elements {start} to {end} of shape {tuple(tensors['expected'].shape)}"


def cut_results(
    tensors: Mapping[str, torch.Tensor], worst: Sequence[int] | None, taken: int = 0
) -> tuple[dict[str, torch.Tensor], int | None]:
    """Do the same where others take up some of the bytes; return the first element, None if they are whole."""
    expected = tensors["expected"]
    room = min(MOST_BYTES, MOST_BYTES - taken) // (len(tensors) * max(t.element_size() for t in tensors.values()))
    if expected.numel() <= room:
        return {name: t.contiguous() for name, t in tensors.items()}, None
    centre = _first_difference(tensors) if worst is None else _flat(worst, expected.shape)
    start = min(max(0, centre - room // 2), expected.numel() - room)
    return {name: t.reshape(-1)[start : start + room].clone() for name, t in tensors.items()}, start


def cut_product(
    tensors: Mapping[str, torch.Tensor], worst: Sequence[int] | None
) -> tuple[dict[str, torch.Tensor], str]:
    """Cut a low-rank product and its factors to rows and columns around the worst element.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        `left` (rows, K), `right` (K, columns), `actual` and, of a merged weight, `base` (rows, columns).
    worst : sequence of int or None
        Row and column of the worst element.
    """
    rows, columns = tensors["actual"].shape
    row, column = (worst or (0, 0))[:2]
    height, width = rows, columns
    while _bytes(tensors, height, width) > MOST_BYTES and (height > 1 or width > 1):
        # columns are cut last: kernels of matrix products are chosen by the long side, which is rarely the rows
        height, width = (max(1, height // 2), width) if height > 1 else (height, max(1, width // 2))
    top = min(max(0, row - height // 2), rows - height)
    left = min(max(0, column - width // 2), columns - width)
    down, across, whole = slice(top, top + height), slice(left, left + width), slice(None)
    parts = {"left": (down, whole), "right": (whole, across)}
    found = {
        name: tensor[parts.get(name, (down, across))].clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    if (height, width) == (rows, columns):
        return found, f"whole, shape {(rows, columns)}"
    return found, f"rows {top} to {top + height}, columns {left} to {left + width} of shape {(rows, columns)}"


def _bytes(tensors: Mapping[str, torch.Tensor], height: int, width: int) -> int:
    rank = tensors["right"].shape[0]
    elements = {"left": height * rank, "right": rank * width}
    return sum(elements.get(name, height * width) * tensor.element_size() for name, tensor in tensors.items())


def _first_difference(tensors: Mapping[str, torch.Tensor]) -> int:
    if "actual" not in tensors:
        return 0
    differs = tensors["actual"].reshape(-1) != tensors["expected"].reshape(-1)
    return int(differs.to(torch.uint8).argmax())


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    return functools.reduce(lambda place, at: place * at[1] + at[0], zip(index, shape, strict=True), 0)
