"""Count in how many words each bit position is set: positional population count with carry-save adders.

Adding 64 columns of single bits with one bitwise operation for all of them takes five such operations per word
(Harley and Seal; Warren, *Hacker's Delight*, 2nd ed., section 5-1), where unpacking the bits takes 64.
"""

from __future__ import annotations

import numpy as np

_WORDS = 4096
"""64-bit words per array: two of an addition's three arrays of 32 KiB stay in a level-1 cache, and little is left to
drain at the end."""

_DIRECT_BYTES = 2048
"""Up to this many bytes are counted directly: draining the adders costs as much as counting some ten thousand words."""

_LANE = 128  # so many ones fit into a byte
_LOWEST_BITS = np.uint64(0x0101010101010101)


class BitCount:
    """Count set bits by position over words of `bits` bits: 8, 16, 32 or 64."""

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
            self._carry(part.view(np.uint64) if len(part) == 8 * _WORDS else _padded(part, _WORDS))

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
        """Add an array of bits; it is taken over."""
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
