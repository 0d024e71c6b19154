"""How fast this host's processor computes and moves bytes, measured by NumPy in a quarter of a second.

NumPy is imported already and its products run on the same processor as torch's, so no process has to import torch for
this. What torch's kernels reach of these speeds is in `costs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from consistency.devices.cores import available_cores

_ORDER = 96
"""Of the matrices: below the size from which NumPy's library takes several threads, whose waiting for one another on a
busy host would be measured instead of the processor."""

_MATRICES = 32

_READ_BYTES = 16 * 2**20
"""More than the caches of a core hold."""

_ROUNDS = 24
"""The best of these counts: other processes can only slow a round down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What one core does per second, and how many there are.

    Attributes
    ----------
    float64_flop, float32_flop : float
        Floating-point operations of matrix products.
    half_flop : float or None
        The same in a half type by kernels of its own; None where the processor has no fast ones.
    read_bytes : float
        Bytes of memory that are read and summed.
    cores : int
    """

    float64_flop: float
    float32_flop: float
    half_flop: float | None
    read_bytes: float
    cores: int


NOMINAL = Speed(float64_flop=4e10, float32_flop=8e10, half_flop=8e10, read_bytes=1e10, cores=1)
"""A core of no host in particular, with AVX-512 at 2 GHz, for the shares that stages have of a worker's time."""


def measure_speed(flags: frozenset[str]) -> Speed:
    """Measure this host, whose processor has these flags of `/proc/cpuinfo`."""
    generator = np.random.default_rng(0)
    wide = generator.standard_normal((_MATRICES, _ORDER, _ORDER))
    narrow = wide.astype(np.float32)
    data = np.ones(_READ_BYTES // 8)
    flop = 2.0 * _MATRICES * _ORDER**3
    float32 = flop / _best(lambda: narrow @ narrow)
    factor = half_factor(flags)
    return Speed(
        float64_flop=flop / _best(lambda: wide @ wide),
        float32_flop=float32,
        half_flop=None if factor is None else factor * float32,
        read_bytes=data.nbytes / _best(data.sum),
        cores=available_cores(),
    )


def half_factor(flags: frozenset[str]) -> float | None:
    """Return how many times faster than float32 a processor multiplies in bfloat16; None without fast kernels.

    A tile unit (AMX) does 16 times the operations per cycle of an AVX-512 unit in float32; 32 to 128 rows times a
    weight of 23 MB were measured at 12 times, besides the time in which the weight is read (Sapphire Rapids, torch
    2.13). Dot products of pairs (AVX512_BF16) do twice the operations; with AVX-512 alone, oneDNN converts to float32
    and back.
    """
    if "amx_bf16" in flags:
        return 12.0
    if "avx512_bf16" in flags:
        return 2.0
    return 1.0 if {"avx512bw", "avx512vl", "avx512dq"} <= flags else None


def _best(work: Callable[[], object]) -> float:
    """Return seconds of this thread, which other processes do not lengthen."""
    taken_s = []
    for _ in range(_ROUNDS):
        started = time.thread_time()
        work()
        taken_s.append(time.thread_time() - started)
    return max(min(taken_s), 1e-9)
