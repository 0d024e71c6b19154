from __future__ import annotations

import itertools
import math
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from consistency.errors import StructureError
from consistency.numerics.distance import hexadecimal, measure
from consistency.numerics.dtype import bit_patterns
from consistency.numerics.kernels import numpy_distance
from consistency.numerics.kernels.numpy_distance import CHUNK
from consistency.numerics.measure import Measure

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NAN, INF = math.nan, math.inf


pytestmark = pytest.mark.usefixtures("numerics_path", "one_thread")


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def differing(found: Measure) -> dict[str, object]:
    """Return the fields that are not those of equal tensors."""
    plain = msgspec.structs.asdict(measure(torch.zeros(1), torch.zeros(1))) | {"elements": found.elements}
    return {k: v for k, v in msgspec.structs.asdict(found).items() if v != plain[k]}


# --- equal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        *FLOATS,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.int8,
        torch.int64,
        torch.uint16,
        torch.bool,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 1), (2, 3)], ids=str)
def test_equal_bits_differ_in_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape).to(dtype)
    found = measure(x.clone(), x)
    assert found.elements == x.numel()
    assert differing(found) == {}


# --- symmetry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(
    a=st.lists(st.floats(allow_subnormal=True), min_size=6, max_size=6),
    b=st.lists(st.floats(allow_subnormal=True), min_size=6, max_size=6),
)
@settings(deadline=None, max_examples=100)
def test_what_has_no_reference_is_symmetric(dtype: torch.dtype, a: list[float], b: list[float]) -> None:
    x, y = tensor(*a, dtype=dtype), tensor(*b, dtype=dtype)
    there, back = measure(x, y), measure(y, x)
    for name in ("mismatched", "max_ulp", "worst_index", "flipped_bits", "first_byte", "last_byte"):
        assert getattr(there, name) == getattr(back, name), name
    for name in ("max_abs", "mean_abs", "rms"):
        assert repr(getattr(there, name)) == repr(getattr(back, name)), name
    assert repr(there.worst_actual) == repr(back.worst_expected)
    assert there.worst_actual_bits == back.worst_expected_bits


def test_nan_stays_the_worst_in_whatever_chunk_it_is() -> None:
    for place in (0, CHUNK - 1, CHUNK, 3 * CHUNK - 1):
        x = torch.zeros(3 * CHUNK)
        y = torch.full_like(x, 7.0)
        y[5] = INF
        x[place] = NAN
        found = measure(x, y)
        assert math.isnan(found.max_abs)
        assert found.worst_index == (place,)
        assert found.max_ulp is None


# --- numbers --------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_small_example() -> None:
    found = measure(tensor(1.0, 2.0, 3.5, -4.0).reshape(2, 2), tensor(1.0, 2.25, 3.0, -4.0).reshape(2, 2))
    assert (found.elements, found.mismatched) == (4, 2)
    assert (found.max_abs, found.mean_abs) == (0.5, 0.1875)
    assert found.rms == pytest.approx(math.sqrt((0.25**2 + 0.5**2) / 4), rel=1e-15)
    assert found.max_rel == pytest.approx(0.5 / 3.0, rel=1e-15)
    assert (found.worst_index, found.worst_actual, found.worst_expected) == ((1, 0), 3.5, 3.0)
    assert (found.worst_actual_bits, found.worst_expected_bits) == ("0x40600000", "0x40400000")
    assert (found.first_byte, found.last_byte) == (4, 8)
    assert found.flipped_bits == {20: 1, 21: 1}
    assert found.ratio is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int64])
def test_integers_and_booleans_are_measured(dtype: torch.dtype) -> None:
    found = measure(torch.tensor([1, 7, 3]).to(dtype), torch.tensor([1, 2, 3]).to(dtype))
    assert (found.mismatched, found.max_abs, found.worst_index, found.max_ulp) == (1, 5.0, (1,), None)
    assert found.flipped_bits == {0: 1, 2: 1}
    found = measure(torch.tensor([True, False]), torch.tensor([True, True]))
    assert (found.mismatched, found.max_abs, found.worst_index, found.flipped_bits) == (1, 1.0, (1,), {0: 1})


def test_a_large_integer_that_float64_cannot_tell_apart_is_still_a_mismatch() -> None:
    found = measure(torch.tensor([2**53 + 1]), torch.tensor([2**53]))
    assert (found.mismatched, found.worst_index, found.flipped_bits) == (1, (0,), {0: 1})


def test_a_complex_element_counts_once_and_keeps_its_index() -> None:
    x = torch.zeros(2, 3, dtype=torch.complex64)
    y = torch.tensor([[0, 0, 1j], [0, 3 + 4j, 0]], dtype=torch.complex64)
    found = measure(y, x)
    assert (found.elements, found.mismatched, found.worst_index) == (6, 2, (1, 1))
    assert (found.max_abs, found.worst_actual) == (4.0, 4.0)


def test_a_view_that_is_not_contiguous_is_measured() -> None:
    x = normal(6, 4)
    y = x.clone()
    y[2, 1] += 1
    assert measure(y[2, 1], x[2, 1]).worst_index == ()
    assert measure(y.T, x.T).worst_index == (1, 2)
    assert measure(y[:, 1], x[:, 1]).worst_index == (2,)


def test_the_tensors_are_left_alone() -> None:
    x, y = normal(10), normal(10, seed=1)
    kept = x.clone(), y.clone()
    measure(x, y)
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])


# --- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_the_size_of_the_chunks_changes_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (normal(40, 30) * 100).to(dtype)
    y = x.clone()
    y[::7, ::3] = (normal(6, 10, seed=1) * 100).to(dtype)
    if dtype.is_floating_point:
        y[13, 7], x[20, 20] = INF, -INF
    found = []
    for size in (1 << 14, 64, 2):
        monkeypatch.setattr(numpy_distance, "CHUNK", size)  # of NumPy's path; test_compiled.py has the other's
        found.append(measure(y, x))
    one = msgspec.structs.asdict(found[0])
    for other in found[1:]:
        for name, value in msgspec.structs.asdict(other).items():
            assert value == (pytest.approx(one[name], rel=1e-12) if name in ("mean_abs", "rms") else one[name]), name


@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 6])
def test_one_element_is_found_wherever_it_is(place: int) -> None:
    x = torch.ones(2 * CHUNK + 7)
    y = x.clone()
    y[place] = 1 + 2.0**-23
    found = measure(y, x)
    assert (found.mismatched, found.max_ulp, found.worst_index) == (1, 1, (place,))
    assert (found.first_byte, found.last_byte) == (4 * place, 4 * place)
    assert found.max_abs == 2.0**-23
    assert found.mean_abs == 2.0**-23 / (2 * CHUNK + 7)
    x, y = torch.zeros(3, CHUNK), torch.zeros(3, CHUNK)
    y[0, 5], y[1, 6], y[2, place % CHUNK] = 1.0, 3.0, 2.0
    found = measure(y, x)
    assert (found.mismatched, found.worst_index, found.max_abs) == (3, (1, 6), 3.0), "the worst of several chunks"
    assert (found.first_byte, found.last_byte) == (4 * 5, 4 * (2 * CHUNK + place % CHUNK))


# --- structure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "what", "got", "wanted"),
    [
        (torch.ones(2, 3), "shapes", "(2, 3)", "(3, 2)"),
        (torch.ones(3, 2, dtype=torch.bfloat16), "dtypes", "bfloat16", "float32"),
    ],
)
def test_another_structure_is_no_number(actual: torch.Tensor, what: str, got: str, wanted: str) -> None:
    with pytest.raises(StructureError, match=f"{what} differ") as caught:
        measure(actual, torch.ones(3, 2))
    assert (caught.value.got, caught.value.wanted) == (got, wanted)


# --- against a plain loop over the elements -------------------------------------------------------------------------


def by_element(a: torch.Tensor, e: torch.Tensor) -> dict[str, object]:
    """Measure two float tensors one element at a time, in Python's own numbers."""
    width = 8 * a.element_size()
    mask, top = (1 << width) - 1, 1 << (width - 1)
    off: list[tuple[int, float, float, int | None, int]] = []
    for i, (x, y) in enumerate(zip(a.reshape(-1), e.reshape(-1), strict=True)):
        bx, by = (int(bit_patterns(v.reshape(1))[0]) & mask for v in (x, y))
        if bx == by:
            continue
        p, q = float(x), float(y)
        paired = math.isnan(p) and math.isnan(q)
        size = 0.0 if p == q or paired else abs(p - q)
        relative = 0.0 if size == 0 else INF if math.isinf(size) or q == 0 else size / abs(q)
        place = [-(b & ~top) if b & top else b for b in (bx, by)]
        steps = None if math.isnan(size) else 0 if paired else abs(place[0] - place[1])
        off.append((i, size, relative, steps, bx ^ by))
    sizes = [o[1] for o in off]
    mean_square = math.fsum(size * size for size in sizes) / a.numel() if all(map(math.isfinite, sizes)) else sum(sizes)
    worst = max(off, key=lambda o: (math.isnan(o[1]), o[1]), default=None)  # the first of several
    return {
        "worst_index": None if worst is None else (worst[0],),
        "rms": math.sqrt(mean_square),
        "mismatched": len(off),
        "max_abs": max(sizes, default=0.0) if not any(map(math.isnan, sizes)) else NAN,
        "max_rel": max((o[2] for o in off), default=0.0) if not any(map(math.isnan, sizes)) else NAN,
        "max_ulp": None if any(o[3] is None for o in off) else max((o[3] or 0 for o in off), default=0),
        "flipped_bits": {b: c for b in range(width) if (c := sum(o[4] >> b & 1 for o in off))},
        "first_byte": off[0][0] * a.element_size() if off else None,
        "last_byte": off[-1][0] * a.element_size() if off else None,
        "mean_abs": math.fsum(sizes) / max(1, a.numel()) if all(map(math.isfinite, sizes)) else sum(sizes),
    }


def is_as_the_loop_says(a: torch.Tensor, e: torch.Tensor) -> None:
    found, wanted = measure(a, e), by_element(a, e)
    for name, value in wanted.items():
        got = getattr(found, name)
        if isinstance(value, float):
            assert got == pytest.approx(value, rel=1e-12, nan_ok=True), name
        else:
            assert got == value, name
    if found.worst_index is None:
        assert differing(found) == {}
        return
    for side, number, bits in (
        (a, found.worst_actual, found.worst_actual_bits),
        (e, found.worst_expected, found.worst_expected_bits),
    ):
        worst = side[found.worst_index]
        assert (str(number), bits) == (str(float(worst)), hexadecimal(worst)), "-0.0 is not 0.0"


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Return zero, one, the largest number, infinity and NaN, what comes after each of them, and all with a minus."""
    bits = bit_patterns(tensor(0.0, 1.0, torch.finfo(dtype).max, NAN, dtype=dtype))
    above = torch.cat([bits, bits + 1]).view(dtype)
    return torch.cat([above, -above])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_pair_of_edges_measures_as_a_loop_over_the_elements_says(dtype: torch.dtype) -> None:
    """Alone, behind an equal pair, and before a differing one: what has no size must hide neither."""
    equal, (left, right) = tensor(INF, dtype=dtype), tensor(3.0, 2.5, dtype=dtype)[:, None]
    for x, y in itertools.product(edges(dtype)[:, None], repeat=2):
        is_as_the_loop_says(x, y)
        is_as_the_loop_says(torch.cat([equal, x]), torch.cat([equal, y]))
        is_as_the_loop_says(torch.cat([equal, x, left]), torch.cat([equal, y, right]))


@pytest.mark.slow
@given(
    dtype=st.sampled_from([*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2]),
    words=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=60),
    keep=st.integers(0, 7),
)
@example(dtype=torch.float8_e4m3fn, words=[(0, 249)], keep=0)  # +0 and -352: seven steps apart as wrapping integers
@settings(deadline=None, max_examples=300)
def test_any_bits_measure_as_a_loop_over_the_elements_says(
    dtype: torch.dtype, words: list[tuple[int, int]], keep: int
) -> None:
    # where `keep` is large most elements are equal, which is the sparse way
    pairs = [(x, y if i % 8 >= keep else x) for i, (x, y) in enumerate(words)]
    is_as_the_loop_says(
        *(torch.from_numpy(np.array(w, np.uint64).view(np.uint8)).view(dtype) for w in zip(*pairs, strict=True))
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.3, 0.01], ids=str)
def test_many_elements_measure_as_numpy_says(dtype: torch.dtype, share: float) -> None:
    r = np.random.default_rng(3)
    e = torch.from_numpy(r.standard_normal(40 * CHUNK + 77)).to(dtype)
    step = torch.from_numpy(r.integers(1, 5, e.numel()) * (r.random(e.numel()) < share))
    a = (bit_patterns(e) + step.to(bit_patterns(e).dtype)).view(dtype)
    found = measure(a, e)
    x, y = a.to(torch.float64).numpy(), e.to(torch.float64).numpy()
    flips = bit_patterns(a).numpy() ^ bit_patterns(e).numpy()
    assert found.mismatched == np.count_nonzero(flips)
    assert (found.max_abs, found.max_ulp) == (np.abs(x - y).max(), 4)
    assert found.mean_abs == pytest.approx(np.abs(x - y).mean(), rel=1e-12)
    assert found.rms == pytest.approx(math.sqrt(((x - y) ** 2).mean()), rel=1e-12)
    assert found.max_rel == (np.abs(x - y)[y != 0] / np.abs(y[y != 0])).max()
    counts = {bit: int(np.count_nonzero(flips & flips.dtype.type(1 << bit))) for bit in range(8)}
    assert {bit: found.flipped_bits.get(bit, 0) for bit in range(8)} == counts


def test_nothing_of_the_size_of_a_tensor_is_allocated() -> None:
    e = normal(2**23)
    a = e * (1 + 1e-6)
    tracemalloc.start()
    measure(a, e)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < e.nbytes / 8
