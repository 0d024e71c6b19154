from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics.bound import Allowance, UserAllowance, delta_allowance, gamma, merged_allowance
from consistency.numerics.chunks import CHUNK, LowRankProduct, LowRankTensor
from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from consistency.numerics.error import measure_against_exact, measure_low_rank
from consistency.numerics.independent_errors import independent_rows
from consistency.numerics.measure import Measure
from consistency.numerics.precision import Precision

pytestmark = pytest.mark.usefixtures("one_thread")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
RANKS = (1, 2, 3, 8, 16, 64, 128, 256)
LARGEST = 2.0**13  # keeps every product, delta and merged weight inside float16


def measure_one(
    actual: torch.Tensor, *, allowance: Allowance | UserAllowance, base: torch.Tensor | None, **factors: Any
) -> Measure:
    tested = LowRankTensor(actual=actual, allowance=allowance, has_base=base is not None)
    (found,) = measure_low_rank([tested], LowRankProduct(base=base, **factors))
    return found


def share(found: Measure) -> float:
    assert found.ratio is not None
    return float(found.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """One adapted weight: `base` (rows, columns), `b` (rows, rank), `a` (rank, columns)."""

    base: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def delta(self) -> torch.Tensor:
        """Multiply in the adapter's own dtype."""
        return (self.b @ self.a) * self.scaling

    def upcast_delta(self) -> torch.Tensor:
        """Multiply as PEFT does on the CPU: bfloat16 and float16 by way of float32."""
        return ((self.b.float() @ self.a.float()) * self.scaling).to(self.a.dtype)

    def measure(self, actual: torch.Tensor, allowance: Allowance | UserAllowance, *, base: bool = False) -> Measure:
        return measure_one(
            actual,
            left=self.b,
            right=self.a,
            scaling=self.scaling,
            base=self.base if base else None,
            allowance=allowance,
        )

    def allowed(self, *, truncating: bool = False) -> Allowance:
        return delta_allowance(self.a.shape[0], scaling=self.scaling, adapter=self.a.dtype, truncating=truncating)

    def allowed_merged(self, roundings: int = 1) -> Allowance:
        return merged_allowance(self.allowed(), weight=self.base.dtype, roundings=roundings)


def make(
    *,
    seed: int,
    rank: int,
    adapter: torch.dtype,
    weight: torch.dtype,
    scaling: float = 2.0,
    exponents: tuple[int, int] = (0, 0),
    rows: int = 9,
    columns: int = 13,
    cancel: bool = False,
) -> Lora:
    """Draw an adapted weight; `cancel` makes base and delta annihilate each other up to the rounding."""
    r = np.random.default_rng(seed)
    a, b = r.standard_normal((rank, columns)), r.standard_normal((rows, rank))
    a, b = a * 2.0 ** exponents[0], b * 2.0 ** exponents[1]
    for size in (np.abs(b) @ np.abs(a), abs(scaling) * (np.abs(b) @ np.abs(a))):
        excess = max(0, math.ceil(math.log2(float(size.max()) / LARGEST))) if size.max() else 0
        b = b * 2.0**-excess
    exact = scaling * (b @ a)
    base = -exact if cancel else r.standard_normal((rows, columns)) * np.abs(exact).max()
    return Lora(
        base=torch.from_numpy(base).to(weight),
        a=torch.from_numpy(a).to(adapter),
        b=torch.from_numpy(b).to(adapter),
        scaling=scaling,
    )


def merges(
    *, min_exponent: int = -6, max_exponent: int = 3, adapters: tuple[torch.dtype, ...] = FLOATS
) -> st.SearchStrategy[Lora]:
    exponents = st.integers(min_exponent, max_exponent)
    return st.builds(
        make,
        seed=st.integers(0, 2**32 - 1),
        rank=st.sampled_from(RANKS),
        adapter=st.sampled_from(adapters),
        weight=st.sampled_from(FLOATS),
        scaling=st.one_of(st.sampled_from([1.0, 2.0, -0.37, 1e-6, 1e4]), st.floats(0.01, 100.0)),
        exponents=st.tuples(exponents, exponents),
        cancel=st.booleans(),
    )


# --- what torch computes lies inside --------------------------------------------------------------------------------


@given(merges())
@settings(deadline=None, max_examples=200)
def test_a_delta_lies_within_its_bound(lora: Lora) -> None:
    for delta in (lora.delta(), lora.upcast_delta()):
        assert share(lora.measure(delta, lora.allowed())) <= 1


@given(merges())
@settings(deadline=None, max_examples=200)
def test_a_merged_weight_lies_within_its_bound(lora: Lora) -> None:
    for delta in (lora.delta(), lora.upcast_delta()):
        plain = lora.base.clone()
        plain += delta  # rounds once, into the weight's dtype
        safe = lora.base.clone() + delta.to(lora.base.dtype)
        assert (lora.measure(plain, lora.allowed_merged(), base=True).ratio or 0) <= 1
        assert (lora.measure(safe, lora.allowed_merged(roundings=2), base=True).ratio or 0) <= 1


# bfloat16 units of processors flush subnormals to zero (Intel's VDPBF16PS, which oneDNN uses): there by way of float32
@given(
    st.one_of(
        merges(adapters=(torch.float32,), min_exponent=-80, max_exponent=-55),
        merges(adapters=(torch.float32,), min_exponent=-149, max_exponent=0),
        merges(adapters=(torch.bfloat16,), min_exponent=-134, max_exponent=0),
        merges(adapters=(torch.float16,), min_exponent=-25, max_exponent=0),
    )
)
@settings(deadline=None, max_examples=200)
def test_subnormal_factors_products_and_weights_lie_within(lora: Lora) -> None:
    delta = lora.upcast_delta()
    assert (lora.measure(delta, lora.allowed()).ratio or 0) <= 1
    merged = lora.base.clone()
    merged += delta
    assert (lora.measure(merged, lora.allowed_merged(), base=True).ratio or 0) <= 1


def _by_rank_one(lora: Lora) -> torch.Tensor:
    total = torch.zeros(lora.base.shape)
    for k in range(lora.a.shape[0]):
        total += torch.outer(lora.b[:, k], lora.a[k])
    return total * lora.scaling


def _in_halves(lora: Lora) -> torch.Tensor:
    half = lora.a.shape[0] // 2
    return (lora.b[:, half:] @ lora.a[half:] + lora.b[:, :half] @ lora.a[:half]) * lora.scaling


def _reversed(lora: Lora) -> torch.Tensor:
    return (lora.b.flip(1) @ lora.a.flip(0)) * lora.scaling


def _scaled_first(lora: Lora) -> torch.Tensor:
    return (lora.b * lora.scaling) @ lora.a


def _one_by_one(lora: Lora) -> torch.Tensor:
    return (lora.b[:, None, :] * lora.a.T[None]).sum(-1) * lora.scaling


def _transposed(lora: Lora) -> torch.Tensor:
    return (lora.a.T @ lora.b.T).T * lora.scaling


@pytest.mark.parametrize("order", [_by_rank_one, _in_halves, _reversed, _scaled_first, _one_by_one, _transposed])
@pytest.mark.parametrize("rank", RANKS)
def test_every_order_of_the_sum_lies_within(order: Callable[[Lora], torch.Tensor], rank: int) -> None:
    for seed in range(5):
        lora = make(seed=seed, rank=rank, adapter=torch.float32, weight=torch.float32, scaling=0.37, cancel=seed > 2)
        delta = order(lora)
        assert (lora.measure(delta, lora.allowed()).ratio or 0) <= 1
        assert (lora.measure(lora.base + delta, lora.allowed_merged(), base=True).ratio or 0) <= 1


def test_the_bound_is_not_idle() -> None:
    # of rank 1 a delta is a few roundings, some of which come near their largest: a bound twice as wide would show
    ratios = []
    for adapter, seed in ((torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 2), (torch.float16, 3)):
        lora = make(seed=seed, rank=1, adapter=adapter, weight=torch.float32, scaling=0.37, rows=40, columns=50)
        ratios.append(lora.measure(lora.delta(), lora.allowed()).ratio or 0)
    assert min(ratios[:2]) > 0.5
    assert min(ratios[2:]) > 0.4


@pytest.mark.parametrize("user_tolerance", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(90, 1000), (700, 100), (3, 5 * CHUNK + 3), (5, 600_000)])
def test_products_in_blocks_are_those_of_the_whole(rows: int, columns: int, user_tolerance: bool) -> None:
    lora = make(
        seed=rows, rank=2, adapter=torch.float32, weight=torch.float32, scaling=0.37, rows=rows, columns=columns
    )
    exact = lora.base.double() + (lora.b.double() * lora.scaling) @ lora.a.double()
    size = (lora.b.double() * lora.scaling).abs() @ lora.a.double().abs()
    derived = Allowance(product=2.0**-10, weight=2.0**-11, floor=2.0**-12)
    allowed = derived.product * size + derived.weight * lora.base.double().abs() + derived.floor
    allowance: Allowance | UserAllowance = derived
    if user_tolerance:
        allowance, allowed = UserAllowance(atol=2.0**-12, rtol=2.0**-9), 2.0**-12 + 2.0**-9 * exact.abs()
    for place in ((0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3), (rows - 1, 0)):
        actual = exact.float()
        actual[place] += 1.0
        found = lora.measure(actual, allowance, base=True)
        off = (actual.double() - exact).abs()
        assert found.worst_index == place
        assert share(found) == pytest.approx(float((off / allowed).max()), rel=1e-9)
        assert (found.max_abs, found.rms) == pytest.approx((float(off.max()), float(off.square().mean().sqrt())))
        assert found.mean_abs == pytest.approx(float(off.mean()), rel=1e-6)
        assert found.mismatched == int(torch.count_nonzero(actual != exact.float()))
        assert found.magnitude == pytest.approx(float(exact.abs().max()), rel=1e-12)


@pytest.mark.parametrize("rank", [1, 16, 300])
def test_no_product_is_large_enough_for_blas_to_start_threads(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = np.matmul, []

    def matmul(x: np.ndarray, y: np.ndarray, *, out: np.ndarray) -> None:
        seen.append(x.shape[0] * x.shape[1] * y.shape[1])
        real(x, y, out=out)

    monkeypatch.setattr(np, "matmul", matmul)
    lora = make(seed=0, rank=rank, adapter=torch.float32, weight=torch.float32, rows=200, columns=3000)
    assert (lora.measure(lora.delta(), lora.allowed()).ratio or 0) <= 1
    assert max(seen) <= 2**18
    assert sum(seen) == 2 * rank * 200 * 3000


# --- what is wrong lies outside -------------------------------------------------------------------------------------


@given(
    lora=merges(min_exponent=-3),
    place=st.tuples(st.integers(0, 8), st.integers(0, 12)),
    times=st.floats(3.0, 50.0),
    sign=st.sampled_from([-1, 1]),
)
@settings(deadline=None, max_examples=150)
def test_an_error_of_a_few_times_the_bound_is_caught_and_located(
    lora: Lora, place: tuple[int, int], times: float, sign: int
) -> None:
    exact = lora.scaling * (lora.b.double() @ lora.a.double())
    size = abs(lora.scaling) * (lora.b.double().abs() @ lora.a.double().abs())
    allowed = lora.allowed()
    delta = lora.upcast_delta().double()
    delta[place] = exact[place] + sign * times * (allowed.product * size[place] + allowed.floor)
    # in float64, so that storing the planted error does not round it away
    found = lora.measure(delta, allowed)
    assert found.ratio == pytest.approx(times, rel=1e-4)
    assert found.worst_index == place


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("adapter", FLOATS, ids=str)
def test_a_left_out_rank_is_caught(adapter: torch.dtype, rank: int) -> None:
    lora = make(seed=rank, rank=rank, adapter=adapter, weight=torch.float32)
    short = (lora.b[:, 1:] @ lora.a[1:]) * lora.scaling
    assert (lora.measure(short, lora.allowed()).ratio or 0) > 2
    assert (lora.measure(lora.base + short, lora.allowed_merged(), base=True).ratio or 0) > 2


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_outside(fault: float) -> None:
    lora = make(seed=0, rank=4, adapter=torch.float32, weight=torch.float32)
    delta = lora.delta()
    delta[3, 5] = fault
    found = lora.measure(delta, lora.allowed())
    assert not (found.ratio or 0) <= 1
    assert found.worst_index == (3, 5)


def test_the_base_is_left_as_it_was() -> None:
    lora = make(seed=0, rank=4, adapter=torch.float64, weight=torch.float64, cancel=True)
    kept = lora.base.clone()
    lora.measure(lora.base, lora.allowed(), base=True)
    assert torch.equal(lora.base, kept)


# --- the allowances -------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 4096), u=st.sampled_from([2.0**-24, 2.0**-11]))
@settings(deadline=None)
def test_gamma_bounds_any_product_of_n_roundings(n: int, u: float) -> None:
    # Higham, lemma 3.1, at its extremes: all n roundings up, and all n down in the denominator
    n = min(n, int(0.5 / u))
    assert gamma(n, u) >= math.expm1(n * math.log1p(u)) > 0
    assert gamma(n, u) * (1 + 1e-12) >= math.expm1(-n * math.log1p(-u))
    assert gamma(n, u) <= 2 * n * u


def test_gamma_by_hand() -> None:
    assert gamma(1, 0.25) == 1 / 3
    assert gamma(2, 0.25) == 1.0


@pytest.mark.parametrize("adapter", FLOATS, ids=str)
def test_a_higher_rank_and_truncating_units_are_allowed_more(adapter: torch.dtype) -> None:
    products = [delta_allowance(r, scaling=1.0, adapter=adapter).product for r in RANKS]
    assert products == sorted(set(products))
    for r in RANKS:
        plain = delta_allowance(r, scaling=1.0, adapter=adapter).product
        wide = delta_allowance(r, scaling=1.0, adapter=adapter, truncating=True).product
        assert wide - plain == pytest.approx((r + 2) * 2.0**-24, rel=1e-2)


def test_a_delta_is_allowed_what_was_derived() -> None:
    float32 = delta_allowance(8, scaling=2.0, adapter=torch.float32)
    assert float32.product == pytest.approx(10 * 2.0**-24, rel=1e-5)
    assert float32.weight == 0
    bfloat16 = delta_allowance(8, scaling=2.0, adapter=torch.bfloat16)
    assert bfloat16.product == pytest.approx(10 * 2.0**-24 + 3 * 2.0**-8, rel=1e-12, abs=1e-12)
    float16 = delta_allowance(8, scaling=2.0, adapter=torch.float16)
    assert float16.product == pytest.approx(10 * 2.0**-24 + 3 * 2.0**-11, rel=1e-12, abs=1e-12)
    assert float16.floor > float32.floor > 0
    float64 = delta_allowance(8, scaling=2.0, adapter=torch.float64)
    assert float64.product == pytest.approx(10 * 2.0**-53, rel=1e-12)


@pytest.mark.parametrize("weight", FLOATS, ids=str)
@pytest.mark.parametrize("roundings", [1, 2])
def test_a_store_adds_its_roundings(weight: torch.dtype, roundings: int) -> None:
    delta = Allowance(product=0.5, floor=0.125)
    found = merged_allowance(delta, weight=weight, roundings=roundings)
    assert found.product == 0.5 + roundings * UNIT_ROUNDOFF[weight]
    assert found.weight == roundings * UNIT_ROUNDOFF[weight]
    assert found.floor == 0.125 + roundings * HALF_SMALLEST_SUBNORMAL[weight]


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def cut_to_tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("narrowed", "own"),
    [(to_tf32, Precision.TF32), (cut_to_tf32, Precision.TF32), (to_bfloat16, Precision.BFLOAT16)],
)
def test_products_of_narrower_operands_lie_outside_the_float32_bound_and_inside_their_own(
    rank: int, narrowed: Callable[[torch.Tensor], torch.Tensor], own: Precision
) -> None:
    generator = np.random.Generator(np.random.PCG64(rank))
    a = torch.from_numpy(generator.standard_normal((rank, 96), dtype=np.float32))
    b = torch.from_numpy(generator.standard_normal((64, rank), dtype=np.float32))
    delta = (narrowed(b) @ narrowed(a)) * 2.0
    shares = {}
    for products in Precision:
        allowance = delta_allowance(rank, scaling=2.0, adapter=torch.float32, products=products)
        shares[products] = share(measure_one(delta, left=b, right=a, scaling=2.0, base=None, allowance=allowance))
    assert shares[own] <= 1
    assert shares[Precision.FLOAT32] > (5 if rank <= 64 else 1)
    assert shares[Precision.TF32] > shares[Precision.BFLOAT16]
    assert delta_allowance(rank, scaling=2.0, adapter=torch.bfloat16, products=Precision.TF32) == delta_allowance(
        rank, scaling=2.0, adapter=torch.bfloat16
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("each", [1, 32])
def test_partial_sums_in_a_half_type_lie_inside_their_own_bound(dtype: torch.dtype, each: int) -> None:
    rank = 256
    generator = np.random.Generator(np.random.PCG64(each))
    a = torch.from_numpy(generator.uniform(0.25, 1, (rank, 96))).to(dtype)
    b = torch.from_numpy(generator.uniform(0.25, 1, (64, rank))).to(dtype)
    product = torch.zeros(64, 96, dtype=dtype)
    for start in range(0, rank, each):
        part = slice(start, start + each)
        product = (product.float() + (b[:, part].float() @ a[part].float()).to(dtype).float()).to(dtype)
    delta = product * 2

    def with_terms(partial_terms: int | None) -> float:
        allowance = delta_allowance(rank, scaling=2.0, adapter=dtype, partial_terms=partial_terms)
        return share(measure_one(delta, left=b, right=a, scaling=2.0, base=None, allowance=allowance))

    assert with_terms(each) <= 1
    if each == 1:
        assert with_terms(None) > 1, "accumulated in the half type altogether"


# --- a tolerance that the user gives ----------------------------------------------------------------------------------

NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)
TOLERANCES = st.one_of(st.just(0.0), st.floats(0, 2, allow_subnormal=False), st.floats(0, allow_infinity=False))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40), TOLERANCES, TOLERANCES)
@settings(deadline=None, max_examples=300)
def test_a_ratio_of_one_is_that_every_element_is_close(
    pairs: list[tuple[float, float]], atol: float, rtol: float
) -> None:
    """Written out once more in NumPy, where what is no number is never close unless both sides are the same."""
    actual = torch.tensor([a for a, _ in pairs], dtype=torch.float32)
    exact = torch.tensor([e for _, e in pairs], dtype=torch.float64)
    found = measure_against_exact(actual, exact, UserAllowance(atol=atol, rtol=rtol))
    a, e = actual.double().numpy(), exact.numpy()
    with np.errstate(all="ignore"):
        close = np.abs(a - e) <= atol + rtol * np.abs(e)
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    close = np.where(np.isfinite(a) & np.isfinite(e), close, False) | same
    assert (share(found) <= 1) == bool(close.all())


@given(merges(), st.floats(0, 1e-2), st.floats(0, 1e-2))
@settings(deadline=None, max_examples=100)
def test_a_merge_is_held_against_what_is_given_around_the_same_exact_value(
    lora: Lora, atol: float, rtol: float
) -> None:
    actual = (lora.base + lora.upcast_delta()).to(lora.base.dtype)
    found = lora.measure(actual, UserAllowance(atol=atol, rtol=rtol), base=True)
    derived = lora.measure(actual, Allowance(product=1.0, floor=1.0), base=True)
    assert (found.max_abs, found.mismatched, found.magnitude) == (
        derived.max_abs,
        derived.mismatched,
        derived.magnitude,
    )
    exact = (lora.b.double() * lora.scaling) @ lora.a.double() + lora.base.double()
    # float64 rounds too: where base and delta cancel, the exact value is known up to this alone
    size = (lora.b.double() * lora.scaling).abs() @ lora.a.double().abs() + lora.base.double().abs()
    noise = 2 * gamma(lora.a.shape[0] + 2, 2.0**-53) * size
    off = (actual.double() - exact).abs()
    least = (off - noise) / (atol + rtol * (exact.abs() + noise))
    most = (off + noise) / (atol + rtol * (exact.abs() - noise).clamp(min=0))
    least, most = (ratio.nan_to_num(nan=0.0, posinf=math.inf).max() for ratio in (least, most))
    assert float(least) * (1 - 1e-12) <= share(found) <= float(most) * (1 + 1e-12)


def test_nothing_given_allows_exact_values_alone() -> None:
    exact = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    nothing = UserAllowance(atol=0.0, rtol=0.0)
    assert share(measure_against_exact(exact.float(), exact, nothing)) == 0
    off = measure_against_exact(torch.tensor([1.0, -2.0, 2.0**-149, 3.0]), exact, nothing)
    assert share(off) == math.inf
    assert off.worst_index == (2,)
    assert share(measure_against_exact(torch.tensor([1.0]), exact[:1] + 2**-40, nothing)) == math.inf


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("given", [UserAllowance(atol=0.0, rtol=0.0), UserAllowance(atol=1e308, rtol=1e308)])
def test_no_tolerance_is_wide_enough_for_what_is_not_finite(fault: float, given: UserAllowance) -> None:
    exact = torch.full((5,), 2.0, dtype=torch.float64)
    actual = exact.float()
    actual[3] = fault
    found = measure_against_exact(actual, exact, given)
    assert not share(found) <= 1
    assert found.worst_index == (3,)
    low_rank = torch.ones(5, 1), torch.ones(1, 1)
    merged = measure_one(
        actual.reshape(5, 1), left=low_rank[0], right=low_rank[1], scaling=1.0, base=torch.ones(5, 1), allowance=given
    )
    assert not share(merged) <= 1


def test_atol_is_absolute_and_rtol_goes_with_the_exact_value() -> None:
    exact = torch.tensor([0.0, 8.0], dtype=torch.float64)
    actual = torch.tensor([0.25, 10.0])
    assert share(measure_against_exact(actual, exact, UserAllowance(atol=0.25, rtol=0.25))) == 1
    assert share(measure_against_exact(actual, exact, UserAllowance(atol=0.5, rtol=0.0))) == 4
    assert share(measure_against_exact(actual, exact, UserAllowance(atol=0.0, rtol=0.5))) == math.inf
    assert share(measure_against_exact(actual[1:], exact[1:], UserAllowance(atol=0.0, rtol=0.125))) == 2


def test_a_tolerance_holds_in_every_chunk() -> None:
    exact = torch.zeros(3 * CHUNK + 7, dtype=torch.float64)
    actual = exact.float()
    actual[2 * CHUNK + 5] = 3.0
    found = measure_against_exact(actual, exact, UserAllowance(atol=1.0, rtol=0.0))
    assert (share(found), found.worst_index) == (3, (2 * CHUNK + 5,))
    assert torch.equal(exact, torch.zeros_like(exact)), "the reference is left as it was"


def test_rows_that_carry_no_error_are_no_draws() -> None:
    exact = torch.zeros(2, 4, 8, dtype=torch.float64)
    assert independent_rows(exact.float() + 1e-6, exact) == 8
    one = exact.float()
    one[1, 2] = 1e-6
    assert independent_rows(one, exact) == 1
    assert independent_rows(exact.float(), exact) == 8
    assert independent_rows(exact[0, 0].float() + 1, exact[0, 0]) == 8
    assert independent_rows(exact.float() + math.nan, exact) == 8
