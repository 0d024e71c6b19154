"""Cut the tensors of a finding to a few bytes that still show the fault."""

from __future__ import annotations

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
        The range of elements that is kept, in words.
    """
    shape = tuple(tensors["expected"].shape)
    cut, start = cut_results(tensors, worst)
    if start is None:
        return cut, f"whole, shape {shape}"
    end = start + cut["expected"].numel()
    return cut, f"elements {start} to {end} of shape {shape}"


def cut_results(
    tensors: Mapping[str, torch.Tensor], worst: Sequence[int] | None, taken: int = 0
) -> tuple[dict[str, torch.Tensor], int | None]:
    """Cut tensors of one shape as `cut_moved` does, where other tensors of the folder have `taken` bytes.

    Returns
    -------
    dict of str to torch.Tensor
        Unchanged if they fit, else `(elements,)`.
    int or None
        Flat index of the first element that is kept; None if the tensors are whole.
    """
    expected = tensors["expected"]
    widest_bytes = max(tensor.element_size() for tensor in tensors.values())
    # `taken` may be negative: the folder still has no more than `MOST_BYTES`
    room = min(MOST_BYTES, MOST_BYTES - taken) // (len(tensors) * widest_bytes)
    if expected.numel() <= room:
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, None
    centre = _first_difference(tensors) if worst is None else _flat_index(worst, expected.shape)
    # at an end of the tensor the range lies to one side of the worst element, and is as long
    start = min(max(0, centre - room // 2), expected.numel() - room)
    # cloned, as a view would keep the whole tensor, and be written whole
    return {name: tensor.reshape(-1)[start : start + room].clone() for name, tensor in tensors.items()}, start


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
        if height > 1:
            height = max(1, height // 2)
        else:
            width = max(1, width // 2)
    top = min(max(0, row - height // 2), rows - height)
    left = min(max(0, column - width // 2), columns - width)
    kept_rows, kept_columns, all_of_them = slice(top, top + height), slice(left, left + width), slice(None)
    # the factors keep their whole rank, over which the product sums
    kept_parts = {"left": (kept_rows, all_of_them), "right": (all_of_them, kept_columns)}
    cut = {}
    for name, tensor in tensors.items():
        part = tensor[kept_parts.get(name, (kept_rows, kept_columns))]
        cut[name] = part.clone(memory_format=torch.contiguous_format)
    if (height, width) == (rows, columns):
        return cut, f"whole, shape {(rows, columns)}"
    return cut, f"rows {top} to {top + height}, columns {left} to {left + width} of shape {(rows, columns)}"


def _bytes(tensors: Mapping[str, torch.Tensor], height: int, width: int) -> int:
    """Return the bytes of a product and its factors, cut to so many rows and columns."""
    rank = tensors["right"].shape[0]
    elements = {"left": height * rank, "right": rank * width}
    return sum(elements.get(name, height * width) * tensor.element_size() for name, tensor in tensors.items())


def _first_difference(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the flat index of the first element that differs; 0 where none does, or `actual` was not stored."""
    if "actual" not in tensors:
        return 0
    differs = tensors["actual"].reshape(-1) != tensors["expected"].reshape(-1)
    return int(differs.to(torch.uint8).argmax())


def _flat_index(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of an element in row-major order."""
    flat = 0
    for position, size in zip(index, shape, strict=True):
        flat = flat * size + position
    return flat
