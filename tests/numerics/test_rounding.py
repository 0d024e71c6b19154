"""Roundings cut numbers as hardware does: to the nearest, ties to even, and once."""

from __future__ import annotations

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from consistency.numerics.diagnosis import ROUNDINGS, Rounding

BY_NAME = {(str(r.word), r.how): r for r in ROUNDINGS}
ANY_BITS = arrays.arrays(np.uint32, st.integers(1, 64), elements=st.integers(0, 2**32 - 1))
EDGES = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001,
     0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0x3F808000, 0x3F818000, 0x7F7FF000, 0x7F7FEFFF, 0xFFFFFFFF],
    np.uint32,
)  # fmt: skip
KEPT = {"rounded-to-bf16": 7, "rounded-to-tf32": 10}


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.float32).copy())


def patterns(values: torch.Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def nearest(bits: np.ndarray, kept: int) -> np.ndarray:
    """Round to the nearest in integers of any length, ties to even; what is no number stays."""
    dropped = 23 - kept
    wide = bits.astype(np.uint64)
    half = np.uint64(1 << (dropped - 1))
    low = wide & np.uint64((1 << dropped) - 1)
    down = wide - low
    odd = (down >> np.uint64(dropped)) & np.uint64(1)
    up = (low > half) | ((low == half) & (odd == 1))
    finite = (bits & 0x7F800000) != 0x7F800000
    return np.where(finite, down + np.where(up, np.uint64(1 << dropped), np.uint64(0)), wide).astype(np.uint32)


@pytest.mark.parametrize("name", ["rounded-to-bf16", "rounded-to-tf32"])
@hypothesis.given(bits=ANY_BITS)
@hypothesis.example(bits=EDGES)
def test_to_the_nearest_with_ties_to_even(name: str, bits: np.ndarray) -> None:
    numbers = ~np.isnan(bits.view(np.float32))
    got = BY_NAME[name, "nearest"](floats(bits))
    assert got.numpy().view(np.uint32)[numbers].tolist() == nearest(bits, KEPT[name])[numbers].tolist()
    assert np.isnan(got.numpy()[~numbers]).all()


@hypothesis.given(bits=ANY_BITS)
@hypothesis.example(bits=EDGES)
def test_float16_is_numpys_own(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    got = BY_NAME["rounded-to-fp16", "nearest"](floats(bits)).numpy()
    numbers = ~np.isnan(values)
    assert got.view(np.uint32)[numbers].tolist() == expected.view(np.uint32)[numbers].tolist()
    assert np.isnan(got[~numbers]).all()


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda r: f"{r.word}-{r.how}")
@hypothesis.given(bits=ANY_BITS)
@hypothesis.example(bits=EDGES)
def test_what_was_cut_once_stays(rounding: Rounding, bits: np.ndarray) -> None:
    given = floats(bits)
    numbers = ~torch.isnan(given)
    once = rounding(given)
    assert once.dtype == given.dtype
    assert patterns(given) == bits.view(np.int32).tolist(), "the argument is not changed"
    assert patterns(rounding(once)[numbers]) == patterns(once[numbers])
    infinite = torch.isinf(given)
    assert patterns(once[infinite]) == patterns(given[infinite])


@pytest.mark.parametrize("name", ["rounded-to-bf16", "rounded-to-tf32"])
@hypothesis.given(bits=ANY_BITS)
@hypothesis.example(bits=EDGES)
def test_truncating_drops_the_last_bits(name: str, bits: np.ndarray) -> None:
    dropped = 23 - KEPT[name]
    got = BY_NAME[name, "truncated"](floats(bits)).numpy().view(np.uint32)
    assert got.tolist() == (bits >> dropped << dropped).tolist()


def test_tf32_of_other_dtypes() -> None:
    """Where float32 holds a number, its dtype is no matter, and TF32 holds every number of half the length."""
    rounding = BY_NAME["rounded-to-tf32", "nearest"]
    values = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -(2.0**-140), float("inf")], dtype=torch.float64)
    assert rounding(values).tolist() == [1 + 2**-10, 1.0, 1 + 2**-9, 0.0, float("inf")]
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    finite = every[~torch.isnan(every)]
    assert torch.equal(rounding(finite).view(torch.int16), finite.view(torch.int16))


def test_what_is_narrower_than_a_dtype() -> None:
    narrower = {
        dtype: [(r.word, r.how) for r in ROUNDINGS if r.is_narrower_than(dtype)]
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.float8_e5m2)
    }
    assert narrower[torch.float32] == list(BY_NAME)
    assert narrower[torch.float64] == [("rounded-to-bf16", "nearest"), ("rounded-to-fp16", "nearest")]
    assert narrower[torch.float16] == [("rounded-to-bf16", "nearest")]
    assert narrower[torch.bfloat16] == narrower[torch.int32] == narrower[torch.float8_e5m2] == []
