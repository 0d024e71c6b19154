from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics.kernels.numpy_distance import BitCount


def counted(words: np.ndarray) -> dict[int, int]:
    bits = 8 * words.itemsize
    one = words.dtype.type
    found = {b: int(np.count_nonzero(words.view(f"u{words.itemsize}") >> one(b) & one(1))) for b in range(bits)}
    return {b: c for b, c in found.items() if c}


@given(
    sizes=st.lists(st.integers(0, 40_000), max_size=6), bits=st.sampled_from([8, 16, 32, 64]), seed=st.integers(0, 9)
)
@settings(deadline=None, max_examples=60)
def test_every_bit_is_counted_however_the_words_come(sizes: list[int], bits: int, seed: int) -> None:
    r = np.random.default_rng(seed)
    parts = [np.frombuffer(r.bytes(n * bits // 8), f"u{bits // 8}") for n in sizes]
    count = BitCount(bits)
    for part in parts:
        count.add(part.copy())
    assert count.result() == counted(np.concatenate([np.empty(0, f"u{bits // 8}"), *parts]))


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_words_of_ones_overflow_no_lane(bits: int) -> None:
    count = BitCount(bits)
    for n in (256, 300_000, 7):
        count.add(np.full(n, -1, f"i{bits // 8}"))
    assert count.result() == dict.fromkeys(range(bits), 300_263)


def test_a_count_can_be_read_twice() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    count = BitCount(32)
    count.add(words.copy())
    assert count.result() == count.result() == counted(words)
