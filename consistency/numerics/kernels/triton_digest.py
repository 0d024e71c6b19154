"""Use the fused Triton kernel for digests, if it may be trusted.

A wrong digest is a false alarm or a miss. So before a process first uses the kernel on a device, it compares the
kernel's sums there with the plain formula on the CPU, on test words. If they differ, or if the kernel cannot be
compiled or run, `sums` returns None from then on, the caller takes its plain path, and `state` gives the reason. Triton
is not a dependency of this package: CUDA builds of torch include it, others do not, which is one of those reasons.

Not proven: Triton 3.7 compiles the kernel for sm_70 to sm_121 and gfx90a to gfx1201 (`tox -e triton37`), and its
interpreter gets the sums right on a CPU, but it has not run on a GPU. `benchmarks/digest_gpu.py` measures its rate
there.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import torch

from consistency.numerics.kernels.hard_inputs import made_up

PLAIN_VARIABLE = "CONSISTENCY_PLAIN_DIGEST"
"""Set to any value, it disables the kernel: a check in the process cannot survive a compiler that crashes."""

FUSED = "fused"

_WORTH_BYTES = 16 << 20
"""Tensors from this size on go to the kernel. On an H200 the plain path, whose temporaries move ten times the tensor's
bytes, takes 35 µs for as much, about what launching the kernel from Python takes; and a process that meets nothing
larger never pays the seconds of the first compilation."""

_MOST_TURNS = 16
"""Most rows per program: the weights, twice what a program takes of a row, then add an eighth to what is read."""
_FEWEST_GROUPS = 2048
"""Fewest groups of rows, by 2 parts of a row: 4096 programs, two for each that an H200 can hold (132 · 16)."""

_states: dict[torch.device, str] = {}
"""The results of `state`, by device."""


def state(device: torch.device) -> str:
    """Return which path this process takes on a CUDA device: `fused`, or `plain: ` and the reason."""
    return _states.get(device, "plain: no tensor was large enough for the kernel")


def sums(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Return the wrapped sum of each row, `(rows,)` int64, or None if the plain path has to be taken.

    Parameters
    ----------
    words : torch.Tensor
        Flat, contiguous, int64, on a CUDA device; the last row may be short.
    w, v : torch.Tensor
        The weights, `(words of a row,)`, int64, on the same device.
    """
    if words.numel() * words.element_size() < _WORTH_BYTES:
        return None
    if words.device not in _states:
        _states[words.device] = _check(w, v)
    if _states[words.device] != FUSED:
        return None
    rows = -(-words.numel() // w.numel())
    return _launch(words, w, v, turns=max(1, min(_MOST_TURNS, rows // _FEWEST_GROUPS)))


def _launch(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, turns: int) -> torch.Tensor:
    """Launch the kernel on the device of the tensor: see `triton_digest_kernel.launch`."""
    from consistency.numerics.kernels import triton_digest_kernel

    with torch.cuda.device(words.device):  # Triton launches on the current device, wherever the tensor is
        return triton_digest_kernel.launch(words, w, v, turns=turns)


def _check(w: torch.Tensor, v: torch.Tensor) -> str:
    """Run the kernel on the device of the weights, and return the state of that device."""
    if os.environ.get(PLAIN_VARIABLE):
        return f"plain: {PLAIN_VARIABLE} is set"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Triton's deprecation warnings
            return _compare(w, v)
    except Exception as error:  # compilers, cache folders and drivers may raise anything
        line = next(iter(str(error).strip().splitlines()), "")
        return f"plain: {type(error).__name__}: {line}"


def _compare(w: torch.Tensor, v: torch.Tensor) -> str:
    """Compare the kernel with the formula in each form in which it will run.

    Triton makes one binary for pointers on a multiple of 16 bytes and one for others, no more (`turns` and the sizes
    are not specialized, and `launch` hides from Triton for AMD how large the storage is), so this check covers every
    binary.
    """
    count = 4 * w.numel() + w.numel() // 5  # four rows and a short fifth
    words = _made_up(count + w.numel())  # words beyond them must not be read
    on_device = words.to(w.device)
    for first in (0, 1):  # on a multiple of 16 bytes, and not
        part = slice(first, first + count)
        expected = _plain(words[part], w.cpu(), v.cpu())
        for turns in (1, 3):
            actual = _launch(on_device[part], w, v, turns=turns).cpu()
            if not torch.equal(actual, expected):
                wrong = int((actual != expected).sum())
                return f"plain: the kernel's sums are wrong in {wrong} of {len(expected)} test rows"
    return FUSED


def _made_up(count: int) -> torch.Tensor:
    """Return test words: extreme ones, many of the largest, then random ones, in which every bit is set and clear."""
    words = made_up(np.dtype(np.int64), count)
    words[5 : count // 4] = -1  # in unsigned halves
    words[5:8] = (1 << 31, (1 << 32) - 1, -(1 << 32))
    return torch.from_numpy(words)


def _plain(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row by the formula, the last row possibly short."""
    rows = words.split(w.numel())
    return torch.stack([(row * w[: len(row)] + (row >> 32) * v[: len(row)]).sum() for row in rows])
