"""Digest rows on a device with torch's own operations, if it computes them right.

A wrong digest is a false alarm or a miss, and integer operations of a backend can be wrong: torch_xla 2.9 has −1 >> 32
= 0. So before a process first digests anything on a device, it digests test words there and compares the sums with
NumPy's. If they differ, or if the device lacks an operation, bytes are digested on the host from then on, and `state`
gives the reason; a device that gets them wrong is reported for it (`fault`). Test words and weights are copied to the
device for that: where such a copy is wrong, the reason says so.
"""

from __future__ import annotations

import numpy as np
import torch

from consistency.errors import first_line
from consistency.numerics.kernels import numpy_digest
from consistency.numerics.kernels.hard_inputs import made_up
from consistency.numerics.kernels.numpy_digest import ROW_WORDS, weights_of_row

PROVEN = "proven"

_ROWS = 5
"""Rows of test words."""

_states: dict[torch.device, str] = {}
"""The results of `state`, by device."""
_faults: dict[torch.device, str] = {}
"""The results of `fault`, by device."""


def state(device: torch.device) -> str:
    """Return `proven`, or `host: ` and the reason; empty before this process has digested anything there."""
    return _states.get(device, "")


def fault(device: torch.device) -> str:
    """Return the reason why a device is faulty; empty for one that is right, untried, or without an operation."""
    return _faults.get(device, "")


def is_proven(w: torch.Tensor, v: torch.Tensor) -> bool:
    """Report whether the weights' device digests right; the first call for a device tries it."""
    if w.device not in _states:
        _states[w.device] = _check(w, v)
    return _states[w.device] == PROVEN


def sums(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the wrapped sum of each row, `(rows,)` int64.

    Parameters
    ----------
    words : torch.Tensor
        Flat, contiguous, int64, whole rows.
    w, v : torch.Tensor
        The weights, `(words of a row,)`, int64, on the same device.
    """
    x = words.view(-1, ROW_WORDS)
    high = torch.bitwise_right_shift(x, 32)
    return torch.addcmul(high.mul_(v), x, w).sum(dim=1)


def _check(w: torch.Tensor, v: torch.Tensor) -> str:
    """Digest test words on the device of the weights, and return its state."""
    words = made_up(np.dtype(np.int64), _ROWS * ROW_WORDS)
    words[ROW_WORDS : 3 * ROW_WORDS] = -1  # the largest sums of halves
    expected = np.empty(_ROWS, np.int64)
    numpy_digest.sum_rows(words.view(np.uint8), expected)
    try:
        on_device = torch.from_numpy(words.view(np.uint8)).to(w.device)  # bytes, as tensors come
        copies = zip((on_device.view(torch.int64), w, v), (words, *weights_of_row()), strict=True)
        if not all(np.array_equal(copy.cpu().numpy(), original) for copy, original in copies):
            return _faulty(w.device, "test words do not come back from the device as they were sent")
        actual = sums(on_device.view(torch.int64), w, v).cpu().numpy()
    except (RuntimeError, TypeError) as error:
        return f"host: the device cannot digest: {first_line(error)}"
    wrong = int((actual != expected).sum())
    if wrong:
        return _faulty(w.device, f"the device's sums are wrong in {wrong} of {_ROWS} test rows")
    return PROVEN


def _faulty(device: torch.device, reason: str) -> str:
    """Note the fault of a device, and return its state."""
    _faults[device] = reason
    return f"host: {reason}"
