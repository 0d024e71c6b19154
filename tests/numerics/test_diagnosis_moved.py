from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from consistency.numerics import words
from consistency.numerics.diagnosis import FEW_ELEMENTS, PAGE_BYTES, Diagnosis, bit_field
from consistency.numerics.diagnosis_moved import OtherContents, diagnose_moved, diagnose_structure
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.dtype import bit_patterns
from consistency.numerics.words import Word

pytestmark = pytest.mark.usefixtures("one_thread")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def diagnose(actual: torch.Tensor, expected: torch.Tensor, others: Mapping[str, str] | None = None) -> Diagnosis:
    other_contents = OtherContents(swapped=lambda tensor: (others or {}).get(digest(tensor).value))
    return diagnose_moved(actual, expected, measure(actual, expected), other_contents=other_contents)


def flip(tensor: torch.Tensor, places: list[int], bit: int) -> torch.Tensor:
    bits = bit_patterns(tensor.clone().reshape(-1))
    width = 8 * tensor.element_size()
    bits[places] ^= (1 << bit) if bit < width - 1 or width == 8 else -(1 << bit)
    return bits.view(tensor.dtype).reshape(tensor.shape)


# --- structure ------------------------------------------------------------------------------------------------------


def test_shape_and_dtype_come_before_any_value() -> None:
    x = torch.zeros(2, 3)
    assert diagnose_structure(x, x) is None
    assert diagnose_structure(torch.ones(2, 3), x) is None
    shape = diagnose_structure(x.T, x)
    assert shape == Diagnosis(word=words.SHAPE, evidence={"got": [3, 2], "wanted": [2, 3]})
    dtype = diagnose_structure(x.bfloat16(), x)
    assert dtype == Diagnosis(word=words.DTYPE, evidence={"got": "torch.bfloat16", "wanted": "torch.float32"})
    both = diagnose_structure(x.T.half(), x)
    assert both is not None
    assert both.word == "shape"


# --- moved bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.int8, torch.complex64], ids=str)
def test_zeros(dtype: torch.dtype) -> None:
    expected = normal(8, 16).mul(10).to(dtype)
    nonzero = int(torch.count_nonzero(torch.view_as_real(expected) if dtype.is_complex else expected.to(torch.float32)))
    assert diagnose(torch.zeros_like(expected), expected) == Diagnosis(
        word=words.ZEROS, evidence={"nonzero_in_reference": nonzero}
    )


def test_zeros_and_other_tensors_are_named_in_that_order() -> None:
    zeros = torch.zeros(8, 16)
    assert diagnose(zeros, normal(8, 16), {digest(zeros).value: "lora_B"}).word == "zeros"
    expected, other = normal(8, 16), normal(8, 16, seed=1)
    others = {digest(other).value: "layers.3.lora_A", digest(normal(8, 16, seed=2)).value: "layers.4.lora_A"}
    assert diagnose(other, expected, others) == Diagnosis(word=words.SWAPPED, evidence={"holds": "layers.3.lora_A"})
    assert diagnose(other, expected, {}).word == "differs"
    assert diagnose(normal(8, 16, seed=3), expected, others).word == "differs"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2], ids=str)
def test_signed_zero(dtype: torch.dtype) -> None:
    expected = normal(8, 16).to(dtype)
    bits = bit_patterns(expected.view(-1))
    bits[:100] = 0
    actual = expected.clone()
    sign = 8 * dtype.itemsize - 1
    bit_patterns(actual.view(-1))[[5, 6, 7]] = 128 if sign == 7 else -(1 << sign)
    assert diagnose(actual, expected) == Diagnosis(word=words.SIGNED_ZERO, evidence={"elements": 3})
    assert diagnose(expected, actual).word == "signed-zero"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_non_finite(dtype: torch.dtype) -> None:
    expected = normal(8, 16, dtype=dtype)
    actual = expected.clone()
    actual[0, :3], actual[5, 5] = math.nan, -math.inf
    assert diagnose(actual, expected) == Diagnosis(word=words.NON_FINITE, evidence={"nan": 3, "inf": 1})


def test_non_finite_where_the_reference_is_so_too_is_another_cause() -> None:
    expected = normal(8, 16)
    expected[0, :3] = math.nan
    actual = expected.clone()
    actual[0, 3:5] = -7.25
    assert diagnose(actual, expected).word != "non-finite"


def test_a_float64_too_large_for_float32_is_finite() -> None:
    expected = normal(8, 16, dtype=torch.float64)
    actual = expected.clone()
    actual[1:3] = 1e300
    assert diagnose(actual, expected).word == "block"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.int64], ids=str)
def test_permuted_rows(dtype: torch.dtype) -> None:
    expected = normal(8, 16).mul(10).to(dtype)
    actual = bit_patterns(expected.view(-1)).view(8, -1)[[0, 5, 2, 3, 4, 1, 6, 7]].view(dtype)
    moved = {"of": "rows", "rows": [1, 5], "count": 2}
    assert diagnose(actual, expected) == Diagnosis(word=words.PERMUTED, evidence=moved)


def test_permuted_elements() -> None:
    expected = normal(8, 16)
    actual = expected.clone()
    actual[1, 2], actual[3, 4] = expected[3, 4], expected[1, 2]
    assert diagnose(actual, expected) == Diagnosis(word=words.PERMUTED, evidence={"of": "elements"})
    assert diagnose(expected.flip(1), expected).evidence == {"of": "elements"}
    flat = expected.view(-1)
    assert diagnose(flat.roll(1), flat) == Diagnosis(word=words.PERMUTED, evidence={"of": "elements"})


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.bfloat16, words.ROUNDED_TO_BF16), (torch.float16, words.ROUNDED_TO_FP16)], ids=str
)
@pytest.mark.parametrize("kept", [torch.float32, torch.float64], ids=str)
def test_rounded_through_a_narrow_dtype(dtype: torch.dtype, word: Word, kept: torch.dtype) -> None:
    expected = normal(8, 16, dtype=kept)
    found = diagnose(expected.to(dtype).to(kept), expected)
    # float16 and TF32 keep as many bits; where every number lies in the range of both, both are named
    both = {"also": "rounded-to-tf32"} if (dtype, kept) == (torch.float16, torch.float32) else {}
    assert found == Diagnosis(word=word, evidence={"rounding": "nearest", **both})


def test_rounded_to_tf32_to_nearest_even_and_by_truncation() -> None:
    # float16 keeps as many bits: only numbers outside its normal range tell the two apart
    expected = normal(64, 16) * 1e-6
    expected[0, :2] = torch.tensor([0x3F801000, 0x3F803000], dtype=torch.int32).view(torch.float32)  # ties
    bits = expected.view(torch.int32)
    truncated = (bits & ~0x1FFF).view(torch.float32)
    assert diagnose(truncated, expected) == Diagnosis(word=words.ROUNDED_TO_TF32, evidence={"rounding": "truncated"})
    # to nearest, independently: a multiple of 2**(exponent - 10); NumPy's rint takes the even one of a tie
    mantissa, exponent = np.frexp(expected.double().numpy())
    nearest = torch.from_numpy(np.ldexp(np.rint(np.ldexp(mantissa, 11)), exponent - 11)).float()
    assert nearest[0, :2].view(torch.int32).tolist() == [0x3F800000, 0x3F804000]
    assert diagnose(nearest, expected) == Diagnosis(word=words.ROUNDED_TO_TF32, evidence={"rounding": "nearest"})


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("field", ["sign", "exponent", "mantissa"])
def test_bit_flip_names_bit_field_and_place(dtype: torch.dtype, field: str) -> None:
    width = 8 * dtype.itemsize
    bit = {"sign": width - 1, "exponent": width - 3, "mantissa": 1}[field]
    expected = normal(40, 50, dtype=dtype)
    found = diagnose(flip(expected, [777], bit), expected)
    assert found == Diagnosis(
        word=words.BIT_FLIP, evidence={"bits": [bit], "elements": 1, "index": [15, 27], "fields": [field]}
    )


def test_an_exponent_bit_that_lands_on_infinity_or_nan_is_a_flipped_bit() -> None:
    expected = normal(40, 50)
    expected[1, 1], expected[2, 2] = 1.0, 1.5  # with bit 30 set: infinity and NaN
    actual = flip(expected, [51, 102], 30)
    assert math.isinf(actual[1, 1])
    assert math.isnan(actual[2, 2])
    found = diagnose(actual, expected)
    assert (found.word, found.evidence["bits"], found.evidence["elements"]) == ("bit-flip", [30], 2)


def test_several_bits_in_several_elements_are_still_flips() -> None:
    expected = normal(40, 50)
    actual = flip(flip(expected, [3, 900], 2), [1500], 31)
    evidence = diagnose(actual, expected).evidence
    assert (evidence["bits"], evidence["elements"], evidence["fields"]) == ([2, 31], 3, ["mantissa", "sign"])


@pytest.mark.parametrize(("count", "word"), [(FEW_ELEMENTS, "bit-flip"), (FEW_ELEMENTS + 1, "differs")])
def test_more_than_a_few_flips_are_another_cause(count: int, word: str) -> None:
    expected = normal(200, 50)
    places = np.random.default_rng(1).choice(10_000, size=count, replace=False).tolist()
    assert diagnose(flip(expected, places, 3), expected).word == word


def test_an_integer_has_bits_but_no_fields() -> None:
    expected = torch.arange(200)
    found = diagnose(flip(expected, [7], 40), expected)
    assert found == Diagnosis(word=words.BIT_FLIP, evidence={"bits": [40], "elements": 1, "index": [7]})


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [2.0, 0.5, -1.0, 4.0, 1.7])
def test_wrong_scale_tells_the_ratio(dtype: torch.dtype, scale: float) -> None:
    expected = normal(40, 50, dtype=dtype)
    expected[0, :5] = 0
    found = diagnose((expected.double() * scale).to(dtype), expected)
    assert found.word == "wrong-scale"
    assert found.evidence["ratio"] == pytest.approx(scale, rel=2 * torch.finfo(dtype).eps)


def test_noise_in_the_last_place_and_what_moves_a_zero_are_no_scale() -> None:
    expected = normal(40, 50)
    expected[3, 3] = 0
    actual = expected * 2
    actual[3, 3] = 0.5
    assert diagnose(actual, expected).word == "differs"
    expected = normal(40, 50)
    up = torch.nextafter(expected, torch.tensor(math.inf))
    assert diagnose(up, expected).word == "differs"
    away = (expected.view(torch.int32) + 1).view(torch.float32)
    assert diagnose(away, expected).word == "differs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_block_tells_offset_length_and_alignment(dtype: torch.dtype, aligned: bool) -> None:
    expected = normal(64, 1024).mul(1000).to(dtype)
    size = dtype.itemsize
    first = PAGE_BYTES // size * 3 + (0 if aligned else 5)
    count = PAGE_BYTES // size * 2
    actual = expected.clone()
    noise = normal(count, seed=1).mul(1000).to(dtype)
    actual.view(-1)[first : first + count] = torch.where(noise == expected.view(-1)[first : first + count], 1, noise)
    found = diagnose(actual, expected)
    assert found == Diagnosis(
        word=words.BLOCK,
        evidence={"offset_bytes": first * size, "length_bytes": 2 * PAGE_BYTES, "page_aligned": aligned},
    )


def test_a_block_to_the_very_end_ends_aligned() -> None:
    expected = normal(3000)
    actual = expected.clone()
    actual[1024:] = normal(1976, seed=1)
    assert diagnose(actual, expected) == Diagnosis(
        word=words.BLOCK, evidence={"offset_bytes": 4096, "length_bytes": 1976 * 4, "page_aligned": True}
    )


def test_scattered_differences_are_no_block() -> None:
    expected = normal(64, 100)
    actual = expected.clone()
    actual.view(-1)[100:2000:3] += 0.123
    assert diagnose(actual, expected).word == "differs"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.complex64, torch.int64], ids=str)
def test_random_noise_is_unknown(dtype: torch.dtype) -> None:
    expected, actual = normal(40, 50).mul(10).to(dtype), normal(40, 50, seed=1).mul(10).to(dtype)
    assert diagnose(actual, expected) == Diagnosis(word=words.DIFFERS)
    if dtype.is_floating_point and dtype.itemsize > 1:
        near = (expected.double() * (1 + normal(40, 50, seed=2).double() / 20)).to(dtype)
        assert diagnose(near, expected) == Diagnosis(word=words.DIFFERS)


def test_equal_bits_have_nothing_to_name() -> None:
    # a digest made on the device and the bytes that are read back can disagree
    for expected in (normal(4, 5), torch.zeros(3), torch.empty(0)):
        assert diagnose(expected.clone(), expected) == Diagnosis(word=words.DIFFERS)


def test_views_are_diagnosed_like_their_copies() -> None:
    expected = normal(50, 40)
    actual = flip(expected, [777], 30)
    found, plain = diagnose(actual.T, expected.T), diagnose(actual.T.contiguous(), expected.T.contiguous())
    assert found == plain
    assert found.evidence["index"] == [17, 19]


@pytest.mark.parametrize(
    ("dtype", "mantissa", "exponent"),
    [
        (torch.float64, 52, 11),
        (torch.float32, 23, 8),
        (torch.float16, 10, 5),
        (torch.bfloat16, 7, 8),
        (torch.float8_e4m3fn, 3, 4),
        (torch.float8_e5m2, 2, 5),
    ],
    ids=str,
)
def test_the_fields_of_every_float(dtype: torch.dtype, mantissa: int, exponent: int) -> None:
    fields = [bit_field(dtype, bit) for bit in range(8 * dtype.itemsize)]
    assert fields == ["mantissa"] * mantissa + ["exponent"] * exponent + ["sign"]


# --- what else it could hold ----------------------------------------------------------------------------------------


def named(actual: torch.Tensor, expected: torch.Tensor, other_contents: OtherContents) -> Diagnosis:
    return diagnose_moved(actual, expected, measure(actual, expected), other_contents=other_contents)


POISON = 0x7FC0FFEE


def test_poison_that_is_still_there_was_never_written_and_a_part_is_told_with_its_place() -> None:
    expected = normal(64, 32)
    actual = torch.full((2048,), POISON, dtype=torch.int32).view(torch.float32).reshape(64, 32)
    found = named(actual, expected, OtherContents(poison=POISON))
    assert found == Diagnosis(word=words.NEVER_WRITTEN, evidence={"elements": 2048, "of": 2048})
    actual = expected.clone()
    actual.view(torch.int32).reshape(-1)[1024:] = POISON
    found = named(actual, expected, OtherContents(poison=POISON))
    place = {"offset_bytes": 4096, "length_bytes": 4096, "page_aligned": True}
    assert found == Diagnosis(word=words.NEVER_WRITTEN, evidence={"elements": 1024, "of": 2048, **place})
    another_nan = torch.full_like(expected, math.nan)
    assert named(another_nan, expected, OtherContents(poison=POISON)).word == "non-finite"


def test_values_from_before_the_loading_are_fresh() -> None:
    expected, initial = normal(8, 32), normal(8, 32, seed=7)
    assert named(initial, expected, OtherContents(initial=digest(initial).value)).word == "fresh-init"
    assert named(initial + 1, expected, OtherContents(initial=digest(initial).value)).word == "differs"
    assert named(torch.zeros(8, 32), expected, OtherContents(initial=digest(torch.zeros(8, 32)).value)).word == "zeros"


def test_bytes_from_elsewhere_are_stale_unless_they_are_another_tensors() -> None:
    expected, held = normal(8, 32), normal(8, 32, seed=7)
    stale = OtherContents(stale=lambda tensor: "bytes 0 to 1024 of w" if torch.equal(tensor, held) else None)
    assert named(held, expected, stale) == Diagnosis(word=words.STALE, evidence={"holds": "bytes 0 to 1024 of w"})
    both = OtherContents(stale=stale.stale, swapped=lambda _: "lora_B")
    assert named(held, expected, both) == Diagnosis(word=words.SWAPPED, evidence={"holds": "lora_B"})


def test_nan_is_counted_in_a_range_and_among_other_differences() -> None:
    expected = normal(64, 32)
    actual = expected.clone()
    actual.reshape(-1)[100:300] = math.nan
    assert diagnose(actual, expected) == Diagnosis(word=words.NON_FINITE, evidence={"nan": 200, "inf": 0})
    actual = expected.clone()
    actual[::2] += 7.0
    actual[5, ::4] = math.inf
    actual[7, ::4] = math.nan
    assert diagnose(actual, expected) == Diagnosis(word=words.NON_FINITE, evidence={"nan": 8, "inf": 8})
