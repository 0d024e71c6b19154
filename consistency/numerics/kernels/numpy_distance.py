"""Measure how far one tensor is from another of the same dtype, with NumPy, in one pass over chunks that stay in cache.

This path serves every dtype, and the compiled kernel is checked against it. Equal stretches are found by comparing
memory, and reductions are vectorised and write into buffers that are reused.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from consistency.numerics.dtype import bit_patterns, elements
from consistency.numerics.kernels.tally import Tally, is_worse, worse
from consistency.numerics.same_bytes import same_memory
from consistency.numerics.steps import Steps, farthest

CHUNK = 1 << 15
"""Elements per chunk: the live data, some 700 KiB for float32, fits in a level-2 cache of 1 MiB, and the
overhead of a NumPy call is a tenth of its work. Threads do not help: calls are so short that they wait for the
interpreter lock."""

_STRETCH = 8
"""Chunks compared as memory at once: 1 MiB of float32, so that the call itself costs little."""

_SPARSE = 8
"""Differing elements are gathered before they are measured, where fewer than one element in this many differs."""

_NO_SIGN = getattr(torch, "float8_e8m0fnu", None)
"""The dtype without a sign: its highest bit belongs to the exponent. Torch has it from 2.7 on."""

_DIRECT = frozenset({torch.float64, torch.float32})
"""Dtypes that NumPy computes in: it has no bfloat16 and is slow at float16."""


def measure_by_numpy(a: torch.Tensor, e: torch.Tensor, parts: int) -> Tally:
    """Measure flat real tensors of any dtype; a number takes `parts` elements, 2 where it is complex."""
    stop = a.numel()
    tally, bits = Tally(), BitCount(8 * a.element_size())
    x, y = bit_patterns(a).numpy(), bit_patterns(e).numpy()
    with np.errstate(all="ignore"):  # NaN and infinities are settled below
        for stretch in range(0, stop, _STRETCH * CHUNK):
            end = min(stop, stretch + _STRETCH * CHUNK)
            if same_memory(x[stretch:end], y[stretch:end]):
                continue
            for chunk in range(stretch, end, CHUNK):
                part = slice(chunk, min(end, chunk + CHUNK))
                _add(tally, bits, a[part], e[part], x[part], y[part], chunk, parts)
    tally.flipped = bits.result()
    return tally


def _add(
    tally: Tally, bits: BitCount, a: torch.Tensor, e: torch.Tensor, x: np.ndarray, y: np.ndarray, start: int, parts: int
) -> None:
    """Add the chunk whose first element has the number `start`; `x` and `y` are the bits of `a` and `e`."""
    differs = np.not_equal(x, y)
    count = int(np.count_nonzero(differs))
    if count == 0:
        return
    if tally.first is None:
        tally.first = start + int(np.argmax(differs))
    tally.last = start + len(differs) - 1 - int(np.argmax(differs[::-1]))
    if parts == 1:
        tally.mismatched += count
    else:  # a complex number differs where either of its parts does
        tally.mismatched += int(np.count_nonzero(differs[0::2] | differs[1::2]))
    places = None
    # elements that are equal add nothing, so where most are, the others are gathered
    if count * _SPARSE < len(differs):
        places = np.flatnonzero(differs)
        a, e, x, y, differs = elements(a, places), elements(e, places), x[places], y[places], differs[places]
    flips = np.bitwise_xor(x, y)
    numbers, reference = numbers_of(a), numbers_of(e)
    difference = None
    # of 8-bit floats some have no infinity: their largest values of one sign are then next to zeros of the other
    if numbers.dtype == np.float32 and a.element_size() > 1:
        difference = _exact_in_float32(tally, numbers, reference, farthest(x, y), torch.finfo(a.dtype).eps)
    if difference is None:
        steps = _steps(a.dtype, x, y, flips)
        difference = _in_float64(tally, numbers, reference, steps)
    largest = float(difference.max())  # NaN is the largest
    if tally.worst is None or is_worse(largest, tally.worst[0]):
        # argmax takes the first NaN; where bits differ and all values are equal, the first of them is shown
        i = int(np.argmax(difference)) if largest != 0 else int(np.argmax(differs))
        place = i if places is None else int(places[i])
        tally.worst = (largest, start + place)
    bits.add(flips)  # takes the array over


def _steps(dtype: torch.dtype, x: np.ndarray, y: np.ndarray, flips: np.ndarray) -> Steps | None:
    """Return the distances in units in the last place; None for a dtype that has none."""
    if dtype == _NO_SIGN:  # in wider integers, so that the highest bit is no sign
        x, y, flips = (bits.astype(np.int16) for bits in (x, y, flips))
    return Steps.between(x, y, flips) if dtype.is_floating_point else None


def _exact_in_float32(
    tally: Tally, numbers: np.ndarray, reference: np.ndarray, apart: int, eps: float
) -> np.ndarray | None:
    """Add a chunk in which each pair is within a factor of two, and return |a - e| in float32; else None.

    Such a difference is exact in the numbers' own format (Sterbenz, *Floating-Point Computation*, 1974, theorem 4.3.1),
    so nothing is lost, and float32 is twice as fast as float64. Two bit patterns less than one exponent step apart
    belong to numbers of one sign within a factor of two, except NaN and infinity, which show in the largest difference.
    """
    if apart * eps >= 1:
        return None
    difference: np.ndarray = np.subtract(numbers, reference)
    np.abs(difference, out=difference)
    largest = float(np.maximum.reduce(difference))
    if not math.isfinite(largest):
        return None
    wide = difference.astype(np.float64)
    tally.sums.append(float(np.add.reduce(wide)))
    tally.squares.append(square_sum(wide))
    tally.max_abs = worse(tally.max_abs, largest)
    size = np.abs(reference)
    relative = np.divide(difference, size)
    limit = float(np.fmax.reduce(relative)) * (1 - 2.0**-22)  # a quotient in float32 is off by 2**-24 at most
    if limit * (1 + 2.0**-21) > tally.max_rel:
        near = np.flatnonzero(relative >= limit)
        quotients = wide[near] / size[near].astype(np.float64)
        tally.max_rel = worse(tally.max_rel, float(quotients.max()))
    if tally.max_ulp is not None:
        tally.max_ulp = max(tally.max_ulp, apart)
    return difference


def _in_float64(tally: Tally, numbers: np.ndarray, reference: np.ndarray, steps: Steps | None) -> np.ndarray:
    """Add a chunk of any values, and return |a - e|: 0 for equal infinities and for paired NaNs."""
    difference: np.ndarray = np.subtract(numbers, reference, dtype=np.float64)
    np.abs(difference, out=difference)
    total = float(np.add.reduce(difference))
    both_nan = None
    if not math.isfinite(total):
        both_nan = np.isnan(numbers) & np.isnan(reference)
        difference[(numbers == reference) | both_nan] = 0.0
        total = float(np.add.reduce(difference))
    largest = float(np.maximum.reduce(difference))
    tally.sums.append(total)
    tally.squares.append(square_sum(difference))
    tally.max_abs = worse(tally.max_abs, largest)
    tally.max_rel = worse(tally.max_rel, _largest_relative(difference, reference))
    if steps is None or math.isnan(largest):
        tally.max_ulp = None
    elif tally.max_ulp is not None:
        farthest_apart = steps.largest if both_nan is None else steps.without(both_nan)
        tally.max_ulp = max(tally.max_ulp, farthest_apart)
    return difference


def numbers_of(part: torch.Tensor) -> np.ndarray:
    """Return a flat real tensor as NumPy floats, exact in float64 except for integers beyond 2**53."""
    if part.dtype in _DIRECT:
        return part.numpy()
    wide = torch.float32 if part.dtype.is_floating_point else torch.float64
    return part.to(wide).numpy()


def square_sum(values: np.ndarray) -> float:
    """Return the sum of squares of a chunk by NumPy's own loop: a BLAS may start threads, which spin against ours."""
    return float(np.einsum("i,i->", values, values))


def _largest_relative(difference: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest difference over the magnitude of the reference; 0 / 0 is 0, infinity / infinity infinite."""
    relative = np.divide(difference, np.abs(reference), dtype=np.float64)
    largest = float(np.maximum.reduce(relative))
    if math.isnan(largest):
        relative[difference == 0] = 0.0
        relative[np.isinf(difference)] = math.inf  # not NaN where the reference is infinite too
        largest = float(np.maximum.reduce(relative))
    return largest


_WORDS = 4096
"""64-bit words per array: two of an addition's three arrays of 32 KiB stay in a level-1 cache, and little is left to
drain at the end."""

_DIRECT_BYTES = 2048
"""Up to this many bytes are counted directly: draining the adders costs as much as counting some ten thousand words."""

_LANE = 128
"""Words that are added up in bytes: so many ones fit into a byte."""
_LOWEST_BITS = np.uint64(0x0101010101010101)
"""The lowest bit of each byte of a word."""


class BitCount:
    """Count set bits by position over words of `bits` bits: 8, 16, 32 or 64, with carry-save adders.

    Adding 64 columns of single bits with one bitwise operation for all of them takes five such operations per word
    (Harley and Seal; Warren, *Hacker's Delight*, 2nd ed., section 5-1), where unpacking the bits takes 64.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._counts = np.zeros(64, np.int64)  # of 64-bit words; folded to `bits` at the end
        self._ones: list[np.ndarray] = []  # a sum bit per column, of weight 2**level
        self._waiting: list[np.ndarray | None] = []  # an array that waits for a second one of its level

    def add(self, words: np.ndarray) -> None:
        """Count the bits of a contiguous integer array, `(n,)` of any width. It is taken over: do not use it again."""
        raw = words.view(np.uint8)
        if len(raw) <= _DIRECT_BYTES:
            self._counts += _columns(_padded(raw, -(-len(raw) // 8)))
            return
        for start in range(0, len(raw), 8 * _WORDS):
            part = raw[start : start + 8 * _WORDS]
            is_full = len(part) == 8 * _WORDS
            words_of_part = part.view(np.uint64) if is_full else _padded(part, _WORDS)
            self._carry(words_of_part)

    def result(self) -> dict[int, int]:
        """Return the count by bit position, 0 the least significant; positions that were never set are left out."""
        counts = self._counts.copy()
        for level, (ones, waiting) in enumerate(zip(self._ones, self._waiting, strict=True)):
            for array in (ones, waiting):
                if array is not None:
                    counts += _columns(array) << level
        by_bit = counts.reshape(-1, self.bits).sum(axis=0)
        return {bit: int(count) for bit, count in enumerate(by_bit) if count}

    def _carry(self, array: np.ndarray) -> None:
        """Add an array of bits, and carry over while a level has two; the array is taken over."""
        level = 0
        while level < len(self._ones):
            first = self._waiting[level]
            if first is None:
                self._waiting[level] = array
                return
            # a full adder: ones + first + array = new ones + 2 * carry
            ones = self._ones[level]
            either = np.bitwise_xor(ones, first)
            np.bitwise_and(ones, first, out=ones)
            np.bitwise_xor(either, array, out=first)
            np.bitwise_and(either, array, out=array)
            np.bitwise_or(array, ones, out=array)
            self._ones[level], self._waiting[level] = first, None
            level += 1
        self._ones.append(array)
        self._waiting.append(None)


def _padded(raw: np.ndarray, words: int) -> np.ndarray:
    """Copy bytes into so many 64-bit words; the rest is zero."""
    padded = np.zeros(words, np.uint64)
    padded.view(np.uint8)[: len(raw)] = raw
    return padded


def _columns(words: np.ndarray) -> np.ndarray:
    """Return how many of the 64-bit words have each bit set, `(64,)`."""
    counts = np.empty((8, 8), np.int64)  # by byte of the word, and bit of the byte
    whole = len(words) // _LANE * _LANE
    for bit in range(8):
        ones = (words >> np.uint64(bit)) & _LOWEST_BITS
        sums = np.add.reduce(ones[:whole].reshape(_LANE, -1), axis=0)  # eight sums side by side, each in a byte
        lanes = np.concatenate([sums, ones[whole:]]).view(np.uint8).reshape(-1, 8)
        counts[:, bit] = np.add.reduce(lanes, axis=0, dtype=np.int64)
    return counts.reshape(64)
