"""Inputs that cover the hard cases of a measure: on them the compiled kernel is compared with NumPy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from consistency.numerics.bound import Allowance, UserAllowance
from consistency.numerics.chunks import Stretch
from consistency.numerics.dtype import bit_patterns
from consistency.numerics.kernels.compiled import BLOCK

_ELEMENTS = 3 * BLOCK + 78
"""Elements of an input: whole blocks and a partial one; even, for complex numbers."""

HARD_CHUNK = 2 * BLOCK
"""Elements of these inputs that share a sum: a chunk has whole blocks and a partial one."""


def hard_stretches(dtype: torch.dtype) -> list[tuple[str, Stretch]]:
    """Return named stretches: with errors of some roundings, for every kind of allowance; and with arbitrary values.

    Exact values are no numbers of the dtype; some are subnormal, zero, a tie between two numbers, or round to infinity.
    """
    stream = np.random.Generator(np.random.PCG64(2))
    info = torch.finfo(dtype)
    tiny = info.tiny * info.eps  # the smallest subnormal number
    exact = stream.standard_normal(_ELEMENTS) * 2.0 ** stream.integers(-4, 5, _ELEMENTS)
    size, steps = np.abs(stream.standard_normal(_ELEMENTS)) + 0.5, stream.integers(-2, 3, _ELEMENTS)
    exact[:BLOCK] *= info.tiny / 2
    special = (0.0, -0.0, 1 + info.eps / 2, 1 + 1.5 * info.eps, 2.5 * tiny)
    exact[BLOCK : BLOCK + len(special)] = special
    base = torch.from_numpy(stream.standard_normal(_ELEMENTS)).to(dtype)
    exact_merged = exact + base.to(torch.float64).numpy()
    alone, merged = (torch.from_numpy(numbers * (1 + steps * info.eps)).to(dtype) for numbers in (exact, exact_merged))
    plain = Stretch(start=7, actual=alone, value=exact)
    on_base = Stretch(start=0, actual=merged, value=exact, base=base)
    terms = {"product": 3 * info.eps, "weight": 2 * info.eps, "floor": float(info.eps)}
    # each term of a bound alone, and all together
    bounds = [Allowance(**{"product": 0.0, name: value}) for name, value in terms.items()] + [Allowance(**terms)]
    user = UserAllowance(atol=info.eps, rtol=2 * info.eps)
    return [
        ("errors", plain),
        ("errors over tolerances", replace(plain, size=size * info.eps)),
        ("errors over a tolerance of zero", replace(plain, size=np.where(steps == 0, 0.0, size))),
        ("errors over NaN", replace(plain, size=np.where(np.arange(_ELEMENTS) == BLOCK + 9, math.nan, size))),
        *(("deltas", replace(plain, size=size, allowance=bound)) for bound in bounds if not bound.weight),
        ("deltas by a user's tolerance", replace(plain, allowance=user)),
        *(("merged weights", replace(on_base, size=size, allowance=bound)) for bound in bounds),
        ("merged weights by a user's tolerance", replace(on_base, allowance=user)),
        *_extreme_stretches(plain, steps, size),
    ]


def _extreme_stretches(plain: Stretch, steps: np.ndarray, size: np.ndarray) -> list[tuple[str, Stretch]]:
    """Return named stretches with the smallest and the largest numbers, infinities, ties, and arbitrary values."""
    dtype, info = plain.actual.dtype, torch.finfo(plain.actual.dtype)
    tiny = info.tiny * info.eps
    about_zero = torch.from_numpy(np.where(steps == 0, -0.0, steps * tiny)).to(dtype)
    largest = torch.full((HARD_CHUNK,), info.max, dtype=dtype)
    factors = 1 + np.append(info.eps * np.linspace(0, 0.5, HARD_CHUNK - 1), 0.9)
    with np.errstate(over="ignore"):  # of float64
        beyond = np.minimum(info.max * factors, np.finfo(np.float64).max)
    twice, exact_twice = plain.actual.clone(), plain.value.copy()
    for index in (BLOCK + 7, 2 * BLOCK + 9):
        exact_twice[index], twice[index] = 3.0, 2.0
    one_infinity, exact_infinity = plain.actual.clone(), plain.value.copy()
    one_infinity[BLOCK + 3], exact_infinity[BLOCK + 3] = math.inf, beyond[-1]
    anything = torch.from_numpy(made_up(np.dtype(f"i{dtype.itemsize}"), _ELEMENTS)).view(dtype)
    wild = made_up(np.dtype(np.int64), _ELEMENTS).view(np.float64)
    wild[HARD_CHUNK:] = anything[HARD_CHUNK:].to(torch.float64).numpy()[::-1]
    derived = Allowance(product=3 * info.eps, weight=2 * info.eps, floor=float(info.tiny))
    return [
        ("values of both signs about zero", Stretch(start=0, actual=about_zero, value=np.roll(steps, 1) * tiny)),
        ("values beyond the largest", Stretch(start=0, actual=largest, value=beyond)),
        ("an error that comes twice", Stretch(start=0, actual=twice, value=exact_twice)),
        ("one infinity", Stretch(start=0, actual=one_infinity, value=exact_infinity)),
        ("one infinity too many", replace(plain, actual=one_infinity)),
        ("arbitrary values", Stretch(start=0, actual=anything, value=wild, size=size)),
        ("arbitrary weights", replace(plain, base=anything, size=size, allowance=derived)),
    ]


def hard_pairs(dtype: torch.dtype) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return named pairs of tensors: close values, values of any size, and arbitrary bits.

    NaN on one side spoils every largest difference, so only the last pair has it. The close values differ away from
    zero, so that it matters which of the two a difference is divided by.
    """
    bits = np.dtype(f"i{dtype.itemsize}")
    stream = np.random.Generator(np.random.PCG64(1))
    numbers = torch.from_numpy(stream.standard_normal(_ELEMENTS)).to(dtype)
    steps = stream.integers(0, 4, numbers.numel()).astype(bits)
    steps[BLOCK : 2 * BLOCK] = 0  # a block that is equal
    close = (bit_patterns(numbers).numpy() + steps).view(bits)
    x, y = _pairs_of_extremes(dtype), made_up(bits, _ELEMENTS)
    bits_of_both = np.concatenate([x[0], y]), np.concatenate([x[1], -y])
    anything = [torch.from_numpy(side).view(dtype) for side in bits_of_both]
    finite = [torch.where(torch.isfinite(side), side, 0) for side in anything]
    both_nan = torch.isnan(anything[0]) & torch.isnan(anything[1])
    paired = [torch.where(both_nan, side, number) for side, number in zip(anything, finite, strict=True)]
    numeric = [torch.where(torch.isnan(side), 1, side) for side in anything]
    return [
        ("close values", torch.from_numpy(close).view(dtype), numbers),
        ("finite values", finite[0], finite[1]),
        ("paired NaNs", paired[0], paired[1]),
        ("values and infinities", numeric[0], numeric[1]),
        ("arbitrary bits", anything[0], anything[1]),
    ]


def _pairs_of_extremes(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of zeros, subnormals, neighbouring numbers, the largest, infinities and NaNs, each with each."""
    info = torch.finfo(dtype)
    numbers = (0.0, info.tiny / 2, info.tiny, 1.0, 1.0 + info.eps, 2.0, info.max, math.inf, math.nan)
    patterns = bit_patterns(torch.tensor(numbers, dtype=torch.float64).to(dtype)).numpy()
    neighbours = patterns + np.ones(1, patterns.dtype)  # NaN gets another payload
    extremes = np.concatenate([patterns, neighbours])
    extremes = np.concatenate([extremes, extremes | np.iinfo(patterns.dtype).min])  # with the other sign
    return np.repeat(extremes, len(extremes)), np.tile(extremes, len(extremes))


def made_up(dtype: np.dtype, count: int) -> np.ndarray:
    """Return integers of the full range, in which every bit is set and clear, including the extreme ones."""
    bounds = np.iinfo(dtype)
    stream = np.random.Generator(np.random.PCG64(0))  # torch's generators are the model's, and are left alone
    words = stream.integers(bounds.min, bounds.max, size=count, dtype=dtype.type, endpoint=True)
    words[:5] = (bounds.min, bounds.max, 0, -1, 1)
    return np.asarray(words)
