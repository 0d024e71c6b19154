"""The compiled kernel against NumPy, and what becomes of one that is wrong, stale or not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.dtype import bit_patterns, named
from consistency.numerics.kernels import compiled as kernel
from consistency.numerics.kernels import trust
from consistency.numerics.kernels.build import compile_kernel
from consistency.numerics.kernels.compiled import CHUNK, DIGEST, KINDS, PURPOSES, Kernel, errors_in
from consistency.numerics.kernels.hard_inputs import hard_pairs, hard_stretches
from consistency.numerics.kernels.numpy_digest import ROW_BYTES
from consistency.numerics.kernels.numpy_distance import measure_by_numpy
from consistency.numerics.kernels.tally import Tally
from consistency.numerics.kernels.trust import (
    differs_in,
    digests_differ_in,
    errors_by_both,
    errors_differ_in,
    measure_by,
)
from consistency.worker import environment

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_found_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(kernel.PLAIN_VARIABLE, raising=False)
    trust.forget()
    yield
    trust.forget()


def rounded_differently(kind: str, elements: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = named(kind)
    r = np.random.default_rng(seed)
    e = torch.from_numpy(r.standard_normal(elements)).to(dtype)
    steps = torch.from_numpy(r.integers(-3, 4, elements)).to(bit_patterns(e).dtype)
    return (bit_patterns(e) + steps).view(dtype), e


# --- against NumPy --------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_every_variant_passes_its_check(variants: list[Kernel]) -> None:
    for found in variants:
        for purpose in PURPOSES:
            assert trust.check(found, purpose) is None


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
@given(
    words=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=60),
    keep=st.integers(0, 7),
    parts=st.sampled_from([1, 2]),
)
@settings(deadline=None, max_examples=100)
def test_any_bits_are_seen_as_numpy_sees_them(
    kind: str, variants: list[Kernel], words: list[tuple[int, int]], keep: int, parts: int
) -> None:
    pairs = [(x, y if i % 8 >= keep else x) for i, (x, y) in enumerate(words * 2)]
    a, e = (torch.from_numpy(np.array(w, np.uint64)).view(named(kind)) for w in zip(*pairs, strict=True))
    expected = measure_by_numpy(a, e, parts)
    for found in variants:
        assert differs_in(measure_by(found, a, e, parts=parts), expected) is None


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", [1, 511, 512, CHUNK, 2 * CHUNK + 513])
def test_sums_are_those_of_numpy_but_for_the_order(kind: str, elements: int, variants: list[Kernel]) -> None:
    a, e = rounded_differently(kind, elements)
    expected = measure_by_numpy(a, e, 1)
    for found in variants:
        seen = measure_by(found, a, e)
        assert differs_in(seen, expected) is None
        assert seen.worst == expected.worst
        assert len(seen.sums) == -(-elements // CHUNK)


def test_the_sums_would_be_held_to_less_than_a_billionth() -> None:
    assert 0 < trust.SUMS_APART < 1e-11
    a, e = rounded_differently("float32", 100)
    seen = measure_by_numpy(a, e, 1)
    off = dataclasses.replace(seen, sums=[1.0001 * s for s in seen.sums])
    assert differs_in(off, seen) == "sums"


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_variants_and_threads_give_the_same_bits(
    kind: str, variants: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_MIN_BYTES_PER_THREAD", 1)
    long = rounded_differently(kind, 5 * CHUNK + 77)
    far = [*long[0].split(CHUNK), torch.tensor([float("inf")]).to(named(kind))]
    pairs = [long, (torch.cat(far[::-1]), torch.cat([long[1], long[1][:1]]))]
    pairs += [(a, e) for _, a, e in hard_pairs(named(kind))]
    for a, e in pairs:
        seen = [measure_by(k, a, e, threads=threads) for k in variants for threads in (1, 2, 3, 9)]
        assert [repr(s) for s in seen] == [repr(seen[0])] * len(seen)


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_numpy_from_every_variant_with_the_same_bits(kind: str, variants: list[Kernel]) -> None:
    for name, stretch in hard_stretches(named(kind)):
        seen = [errors_by_both(found, stretch) for found in variants]
        assert [errors_differ_in(*pair) for pair in seen] == [None] * len(seen), name
        assert [repr(compiled) for compiled, _ in seen] == [repr(seen[0][0])] * len(seen), name


@pytest.mark.process
def test_errors_of_elements_that_lie_at_any_byte_are_measured(variants: list[Kernel]) -> None:
    _, stretch = hard_stretches(torch.float32)[-1]
    assert stretch.base is not None
    moved = torch.zeros(2, stretch.actual.nbytes + 3, dtype=torch.uint8)[:, 3:]
    for place, tensor in zip(moved, (stretch.actual, stretch.base), strict=True):
        place.copy_(tensor.view(torch.uint8))
    # a mapped file's tensor may start anywhere: torch cannot view it so, NumPy can
    actual, base = (torch.from_numpy(place.numpy().view(np.float32)) for place in moved)
    unaligned = dataclasses.replace(stretch, actual=actual, base=base)
    for found in variants:
        assert repr(errors_by_both(found, unaligned)) == repr(errors_by_both(found, stretch))


@pytest.mark.process
def test_ranges_that_lie_at_any_byte_are_measured(variants: list[Kernel]) -> None:
    a, e = rounded_differently("float32", 1000)
    moved = torch.zeros(2, 4003, dtype=torch.uint8)[:, 3:]
    moved[0], moved[1] = a.view(torch.uint8), e.view(torch.uint8)
    for found in variants:
        seen = found.measure("float32", moved[0].data_ptr(), moved[1].data_ptr(), 1000)
        assert seen.mismatched == measure_by_numpy(a, e, 1).mismatched


@pytest.mark.process
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_threads_digest_rows_of_their_own(rows: int, variants: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_MIN_DIGESTED_PER_THREAD", ROW_BYTES)
    raw = np.random.default_rng(rows).integers(0, 256, rows * ROW_BYTES, np.uint8)
    for variant in variants:
        for threads in (1, 2, 3):
            assert digests_differ_in(variant, raw, threads=threads) is None, (variant.variant, threads)


@pytest.mark.process
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_digests_are_those_of_numpy(rows: int, offset: int, variants: list[Kernel]) -> None:
    raw = np.frombuffer(np.random.default_rng(0).bytes(rows * ROW_BYTES + offset), np.uint8)[offset:]
    assert [digests_differ_in(found, raw) for found in variants] == [None] * len(variants)


def test_what_does_not_lie_in_a_row_goes_to_numpy(kernel_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", kernel_library)
    a, e = rounded_differently("float32", 100)
    assert measure(a[::2], e[::2]) == measure(a[::2].clone(), e[::2].clone())
    assert digest(a[::2]) == digest(a[::2].clone())


# --- whether it is trusted ------------------------------------------------------------------------------------------


def test_a_right_kernel_is_used(kernel_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", kernel_library)
    taken = []
    plain = Kernel.measure

    def noted(*args: Any, **options: Any) -> Tally:
        taken.append(args)
        return plain(*args, **options)

    monkeypatch.setattr(Kernel, "measure", noted)
    assert trust.trusted("float32") is not None
    before = len(taken)
    measure(torch.ones(3), torch.zeros(3))
    assert len(taken) == before + 1
    assert trust.state() == f"compiled: {kernel.VARIANTS[Kernel(kernel_library).variant]}"


def test_it_is_checked_once_for_each_purpose(kernel_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", kernel_library)
    checked: list[str] = []
    monkeypatch.setattr(trust, "check", lambda _, purpose: checked.append(purpose))
    for _ in range(2):
        measure(torch.ones(3), torch.zeros(3))
        digest(torch.ones(ROW_BYTES))
    assert sorted(checked) == [DIGEST, "float32"]


FLOATS = set(KINDS)
ERRORS = {*map(errors_in, KINDS)}
HALF, BRAIN = {errors_in("float16")}, {errors_in("bfloat16")}
WRONG = {  # what is planted, and the purposes for which it has to be refused
    "a wrong scale of subnormals": ("0x1p-24f", "0x1p-25f", {"float16", *HALF}),
    "a wrong exponent of infinity": ("? 112u << 23 : 0", "? 111u << 23 : 0", {"float16", *HALF}),
    "a byte that overflows": ("GROUPS_PER_DRAIN = 255", "GROUPS_PER_DRAIN = 256", FLOATS),
    "a carry of the wrong weight": ("4 * (c->fours", "3 * (c->fours", FLOATS),
    "a lane too few": ("i += LANES)", "i += LANES + LANES)", FLOATS | ERRORS),
    "a square that is none": ("t0 += d0 * d0", "t0 += d0", FLOATS | ERRORS),
    "zeros of two signs a step apart": ("(0 - magnitude)", "(~magnitude)", FLOATS | ERRORS),
    "relative to the other side": ("double r = d / fabs(q);", "double r = d / fabs(number(kind, a, i));", FLOATS),
    "paired NaNs that differ": ("|| (isnan(p) && isnan(q))", "", FLOATS),
    "the last of the worst": ("if (most.off > worst_key)", "if (most.off >= worst_key)", FLOATS),
    "an end that is not read": ("if (!any) continue;", "if (!any || stop - block < BLOCK) continue;", FLOATS),
    "a shift without the sign": ("(sign | x >> 32)", "(x >> 32)", {DIGEST}),
    "a row of the wrong length": ("ROW_WORDS = 8192 / 8", "ROW_WORDS = 8192 / 8 - 1", {DIGEST}),
    "an exact value that is cut": ("(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 16", BRAIN),
    "ties that go up": ("0xfff + (x >> 13 & 1)", "0x1000", HALF),
    "subnormals that are a step off": ("small - (126u << 23)", "small - (126u << 23) + 1", HALF),
    "an exponent beyond that of infinity": ("normal > 0x7c00 ? 0x7c00 : normal", "normal", HALF),
    "a weight that is taken away": ("e += number(kind, of->base, i)", "e -= number(kind, of->base, i)", ERRORS),
    "a weight that is allowed nothing": ("* p + fabs(number(kind, of->base, i)) * w + f", "* p + f", ERRORS),
    "a tolerance of the signed value": ("fabs(exact[i]) * p + f", "exact[i] * p + f", ERRORS),
    "no floor under what is allowed": ("load64(of->size, i)) * p + f)", "load64(of->size, i)) * p)", ERRORS),
    "quotients that are not taken": ("!(off < best * fabs(by))", "(off > 2 * best * fabs(by))", ERRORS),
    "nothing over nothing": ("fabs(off[i] == 0 ? 0.0 : q)", "fabs(q)", ERRORS),
    "NaN over NaN": ("if (score > KEY_OF_INFINITY) return 0;", "", ERRORS),
    "infinity that is a number": ("most.off >= KEY_OF_INFINITY || ", "0 || ", ERRORS - {errors_in("float64")}),
    "the last of the largest errors": (
        "(of_key(most.off) > seen->max_abs) {",
        "(of_key(most.off) >= seen->max_abs) {",
        ERRORS,
    ),
    "chunks left out that count": ("if (settled) *seen = here;", "*seen = here;", ERRORS),
    "an element too few": ("const int64_t held = stop - block;", "const int64_t held = stop - block - 1;", ERRORS),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("right", "wrong", "refused"), WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_refused(
    right: str, wrong: str, refused: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = kernel.SOURCE.read_text(encoding="utf-8")
    assert text.count(right) == 1
    source, library = tmp_path / "kernel.c", tmp_path / "_kernel.so"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    reason = compile_kernel(source, library, "-O0", "-DPLAIN_ONLY")
    if reason is not None:
        pytest.skip(f"the kernel cannot be compiled here: {reason}")
    monkeypatch.setattr(kernel, "SOURCE", source)
    monkeypatch.setattr(kernel, "LIBRARY", library)
    assert {purpose for purpose in PURPOSES if trust.trusted(purpose) is None} == refused
    assert trust.state().startswith("numpy: ")
    assert all(purpose in trust.state() for purpose in refused)


def test_one_of_another_source_is_refused(
    kernel_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernel.c"
    source.write_text("/* edited since */", encoding="utf-8")
    monkeypatch.setattr(kernel, "SOURCE", source)
    monkeypatch.setattr(kernel, "LIBRARY", kernel_library)
    assert trust.trusted("float32") is None
    assert "compiled from another kernel.c" in trust.state()


def test_what_is_no_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_kernel.so").write_bytes(b"no library")
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "_kernel.so")
    assert trust.trusted(DIGEST) is None
    assert trust.state().startswith("numpy: OSError: ")


def test_without_it_numpy_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "none.so")
    assert trust.state() == "numpy: this installation was built without it"
    assert measure(torch.ones(3), torch.zeros(3)).mismatched == 3


def test_a_variant_of_another_processor_is_not_run(kernel_library: Path) -> None:
    with pytest.raises(ValueError, match="cannot run"):
        Kernel(kernel_library, variant=-1)


def test_a_worker_tells_which_path_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel.PLAIN_VARIABLE, "1")
    assert environment.describe(CPU)["compiled_kernel"] == "numpy: CONSISTENCY_NO_KERNEL is set"


# --- how it is built ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler -O2"])
def test_without_a_compiler_it_is_left_out(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert compile_kernel(kernel.SOURCE, tmp_path / "_kernel.so")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_kernel(kernel.SOURCE, tmp_path / "_kernel.so")
    assert not (tmp_path / "_kernel.so").exists()


def test_who_wants_none_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel.PLAIN_VARIABLE, "1")
    assert compile_kernel(kernel.SOURCE, tmp_path / "_kernel.so") == "CONSISTENCY_NO_KERNEL is set"
