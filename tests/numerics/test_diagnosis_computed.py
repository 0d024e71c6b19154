from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics import words
from consistency.numerics.bound import Allowance, UserAllowance, delta_allowance, merged_allowance
from consistency.numerics.chunks import Chunk, LowRankProduct, LowRankTensor, exact_chunks, low_rank_chunks
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.diagnosis_computed import diagnose_computed
from consistency.numerics.dtype import bit_patterns
from consistency.numerics.error import measure_against_exact, measure_low_rank
from consistency.numerics.measure import Measure
from consistency.numerics.precision import Precision
from consistency.numerics.real import Real

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, COLUMNS, RANK = 96, 640, 8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


class Case:
    """A healthy merge or delta, and what a device made of it."""

    def __init__(self, *, weight: torch.dtype | None = torch.float32, adapter: torch.dtype = torch.float32) -> None:
        self.left = normal(ROWS, RANK, seed=1, dtype=adapter)
        self.right = normal(RANK, COLUMNS, seed=2, dtype=adapter)
        self.scaling = 2.0
        self.base = None if weight is None else normal(ROWS, COLUMNS, seed=3, dtype=weight)
        self.adapter, self.weight = adapter, weight
        self.delta = ((self.left.float() @ self.right.float()) * self.scaling).to(adapter)

    def healthy(self) -> torch.Tensor:
        if self.base is None:
            return self.delta.clone()
        return (self.base.float() + self.delta.float()).to(self.base.dtype)

    def diagnose(self, actual: torch.Tensor) -> Diagnosis:
        def allowance(products: Precision) -> Allowance:
            delta = delta_allowance(RANK, scaling=self.scaling, adapter=self.adapter, products=products)
            return delta if self.weight is None else merged_allowance(delta, weight=self.weight, roundings=1)

        plain, wide = (self.tested(actual, allowance(products)) for products in (Precision.FLOAT32, Precision.TF32))
        (found,) = measure_low_rank([plain], self.product())
        chunks = partial(low_rank_chunks, plain, self.product())
        return diagnose_computed(found, chunks, in_tf32=lambda: measure_low_rank([wide], self.product())[0])

    def tested(self, actual: torch.Tensor, allowance: Allowance | UserAllowance) -> LowRankTensor:
        return LowRankTensor(actual=actual, allowance=allowance, has_base=self.base is not None)

    def product(self) -> LowRankProduct:
        return LowRankProduct(left=self.left, right=self.right, scaling=self.scaling, base=self.base)


CASES = [
    pytest.param({"weight": None}, id="delta"),
    *(pytest.param({"weight": dtype}, id=f"weight-{dtype}") for dtype in FLOATS),
    pytest.param({"weight": torch.bfloat16, "adapter": torch.bfloat16}, id="weight-and-adapter-bfloat16"),
]


@pytest.mark.parametrize("options", CASES)
def test_a_healthy_merge_is_accumulation_order(options: dict[str, torch.dtype]) -> None:
    case = Case(**options)
    assert case.diagnose(case.healthy()) == Diagnosis(word=words.ACCUMULATION_ORDER)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("ratio", [0.5, 2.0, -1.0, 3.0])
def test_another_factor_is_a_wrong_scale(options: dict[str, torch.dtype], ratio: float) -> None:
    case = Case(**options)
    case.delta = (case.delta.float() * ratio).to(case.delta.dtype)
    found = case.diagnose(case.healthy())
    assert found.word == "wrong-scale"
    assert found.evidence["ratio"] == pytest.approx(ratio, rel=0.01)


def test_a_factor_is_known_by_the_elements_that_round_least() -> None:
    """As an optimizer's step, of one size everywhere, on parameters whose roundings differ by orders of magnitude."""
    base = torch.logspace(-6, 1, 128)
    exact = base.double() + 1e-3
    actual = (base.double() + 1.001e-3).float()
    allowed = exact.abs() * 2**-24

    def chunks() -> Iterator[Chunk]:
        (chunk,) = exact_chunks(actual, exact, allowed)
        yield dataclasses.replace(chunk, base=base)

    found = diagnose_computed(msgspec.structs.replace(measure_against_exact(actual, exact), ratio=2.0), chunks)
    assert (found.word, found.evidence["ratio"]) == ("wrong-scale", pytest.approx(1.001, rel=1e-6))


def test_another_adapter_is_unknown_and_a_factor_that_tf32_could_explain_is_a_scale() -> None:
    case = Case()
    case.delta *= 1.0005
    found = case.diagnose(case.healthy())
    assert (found.word, found.evidence["ratio"]) == ("wrong-scale", pytest.approx(1.0005, rel=1e-6))
    case.delta = normal(ROWS, COLUMNS, seed=9)
    assert case.diagnose(case.healthy()) == Diagnosis(word=words.DIFFERS)


@pytest.mark.parametrize("options", CASES)
def test_a_merge_that_added_nothing_is_zeros(options: dict[str, torch.dtype]) -> None:
    case = Case(**options)
    case.delta.zero_()
    assert case.diagnose(case.healthy()).word == "zeros"


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("bit", ["sign", "exponent", "mantissa"])
def test_a_bit_that_flipped_after_the_merge_is_told_from_rounding(options: dict[str, torch.dtype], bit: str) -> None:
    case = Case(**options)
    actual = case.healthy()
    width = 8 * actual.element_size()
    mantissa = round(-math.log2(torch.finfo(actual.dtype).eps))
    flipped = {"sign": width - 1, "exponent": width - 2, "mantissa": mantissa - 1}[bit]
    flat = bit_patterns(actual.reshape(-1))
    place = int(actual.float().abs().reshape(-1).argmax())
    flat[place] ^= torch.tensor(-(1 << flipped) if flipped == width - 1 else 1 << flipped, dtype=flat.dtype)
    found = case.diagnose(actual)
    if bit == "mantissa" and case.adapter == torch.bfloat16:
        # eight bits of mantissa, and a bound of several of their last: too near for a rounding to be ruled out
        assert found == Diagnosis(word=words.DIFFERS)
        return
    assert (found.word, found.evidence["bits"], found.evidence["fields"]) == ("bit-flip", [flipped], [bit])


@pytest.mark.parametrize("options", CASES)
def test_a_range_that_was_not_merged_is_a_block(options: dict[str, torch.dtype]) -> None:
    case = Case(**options)
    actual = case.healthy()
    size = actual.element_size()
    actual.reshape(-1)[4096 // size : 12288 // size] = 1000.0
    found = case.diagnose(actual)
    place = {"offset_bytes": 4096, "length_bytes": 8192, "page_aligned": True}
    assert found == Diagnosis(word=words.BLOCK, evidence=place)


def test_an_error_of_the_whole_tensor_that_spares_small_elements_at_its_ends_is_no_block() -> None:
    exact = normal(2048).to(torch.float64)
    exact[:21], exact[-3:] = 1e-3, -1e-3
    actual = (exact * (1.5 + 0.2 * normal(2048, seed=1))).to(torch.float32)
    allowed = torch.full_like(exact, 2e-3)
    found = measure_against_exact(actual, exact, allowed)
    chunks = partial(exact_chunks, actual, exact, allowed)
    assert found.ratio is not None
    assert diagnose_computed(found, chunks) == Diagnosis(word=words.DIFFERS)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_and_counted(options: dict[str, torch.dtype], value: float) -> None:
    case = Case(**options)
    actual = case.healthy()
    actual[2:7:2, 3] = value
    found = case.diagnose(actual)
    counts = {"nan": 3, "inf": 0} if math.isnan(value) else {"nan": 0, "inf": 3}
    assert found == Diagnosis(word=words.NON_FINITE, evidence=counts)


def test_nan_is_counted_in_a_range_and_among_other_errors() -> None:
    case = Case()
    actual = case.healthy()
    actual.reshape(-1)[1000:3000] = math.nan
    assert case.diagnose(actual) == Diagnosis(word=words.NON_FINITE, evidence={"nan": 2000, "inf": 0})
    actual = case.healthy()
    actual[::3] += 7.0
    actual[5, ::7] = math.nan
    assert case.diagnose(actual) == Diagnosis(word=words.NON_FINITE, evidence={"nan": 92, "inf": 0})


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.bfloat16, "rounded-to-bf16"), (torch.float16, "rounded-to-fp16")], ids=str
)
@pytest.mark.parametrize("weight", [None, torch.float32], ids=str)
def test_a_merge_in_a_narrower_format_is_named(weight: torch.dtype | None, dtype: torch.dtype, word: str) -> None:
    case = Case(weight=weight)
    assert case.diagnose(case.healthy().to(dtype).float()).word == word


@pytest.mark.parametrize("weight", [None, torch.float32], ids=str)
@pytest.mark.parametrize("truncated", [True, False])
def test_products_in_tf32_are_named(weight: torch.dtype | None, truncated: bool) -> None:
    def cut(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32)
        bits = bits if truncated else bits + 0xFFF + ((bits >> 13) & 1)
        return (bits & ~0x1FFF).view(torch.float32)

    case = Case(weight=weight)
    case.delta = (cut(case.left) @ cut(case.right)) * case.scaling
    found = case.diagnose(case.healthy())
    assert found.word == "tf32-products"
    assert 0 < found.evidence["tf32_bound_ratio"] <= 1


# --- against an exact value, one allowance for all ------------------------------------------------------------------


def activations(actual: torch.Tensor, exact: torch.Tensor, allowed: float) -> Diagnosis:
    return diagnose_computed(measure_against_exact(actual, exact), partial(exact_chunks, actual, exact, allowed))


def test_activations_are_named_too() -> None:
    exact = normal(64, 300, dtype=torch.float64)
    rounded = exact.float()
    assert activations(rounded * 1.0001, exact, 1e-6).word == "wrong-scale"
    assert activations(torch.zeros_like(rounded), exact, 1e-6).word == "zeros"
    assert activations(rounded.bfloat16().float(), exact, 1e-6).word == "rounded-to-bf16"
    assert activations(rounded + 0.1, exact, 1e-6).word == words.DIFFERS


@given(seed=st.integers(0, 2**16), factor=st.floats(1.01, 20))
@settings(deadline=None, max_examples=60)
def test_one_element_a_few_times_outside_is_no_flipped_bit(seed: int, factor: float) -> None:
    # some bit of some size brings most of them back: that is no sign of one
    exact = normal(40, 50, seed=seed, dtype=torch.float64)
    actual = exact.float()
    actual.view(-1)[seed % 2000] += factor * 1e-5
    found = activations(actual, exact, 1e-5)
    assert found.word in (words.DIFFERS, words.ACCUMULATION_ORDER)


def measured(ratio: float | None) -> Measure:
    found = measure_against_exact(torch.ones(4), torch.ones(4, dtype=torch.float64))
    return msgspec.structs.replace(found, mismatched=1, ratio=None if ratio is None else Real(ratio))


def test_inside_the_bound_is_accumulation_order_and_outside_or_without_one_unknown() -> None:
    for ratio in (0.0, 0.5, 1.0):
        assert diagnose_computed(measured(ratio)) == Diagnosis(word=words.ACCUMULATION_ORDER)
    for beyond in (1.0000001, 1e9, math.nan, None):
        assert diagnose_computed(measured(beyond)) == Diagnosis(word=words.DIFFERS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_without_the_values_what_is_not_finite_is_named_with_its_place(value: float) -> None:
    exact = normal(4, 5, dtype=torch.float64)
    actual = exact.float()
    actual[2, 3] = value
    found = diagnose_computed(measure_against_exact(actual, exact))
    assert found == Diagnosis(word=words.NON_FINITE, evidence={"at": [2, 3]})


@given(seed=st.integers(0, 2**16), factor=st.floats(1.5, 50))
@settings(deadline=None, max_examples=40)
def test_noise_of_a_few_times_the_bound_is_no_word_of_a_cause(seed: int, factor: float) -> None:
    exact = normal(40, 50, seed=seed, dtype=torch.float64)
    allowed = 1e-5
    noise = torch.from_numpy(np.random.default_rng(seed + 1).choice([-factor, factor], exact.shape)) * allowed
    assert activations((exact + noise).float(), exact, allowed) == Diagnosis(word=words.DIFFERS)


def test_a_tolerance_of_the_users_own_is_what_is_gone_by() -> None:
    case = Case()
    actual = case.healthy()
    bit_patterns(actual.reshape(-1))[7] ^= 1 << 30
    tight = UserAllowance(atol=1e-3, rtol=1e-3)
    tested = case.tested(actual, tight)
    (found,) = measure_low_rank([tested], case.product())
    assert diagnose_computed(found, partial(low_rank_chunks, tested, case.product())).word == "bit-flip"
    exact = normal(64, 300, dtype=torch.float64)
    scaled = (exact * 3).float()
    measured = measure_against_exact(scaled, exact, tight)
    assert diagnose_computed(measured, partial(exact_chunks, scaled, exact, tight)).word == "wrong-scale"
