"""The kernel built for another processor and with sanitizers: sizes, places and values of every kind, and mistakes."""

from __future__ import annotations

import itertools
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from consistency.numerics.bound import Allowance, UserAllowance
from consistency.numerics.chunks import Stretch
from consistency.numerics.dtype import bit_patterns, named
from consistency.numerics.kernels import compiled, hard_inputs
from consistency.numerics.kernels.build import compile_kernel
from consistency.numerics.kernels.compiled import BLOCK, CHUNK, KINDS, Kernel
from consistency.numerics.kernels.hard_inputs import HARD_CHUNK, made_up
from consistency.numerics.kernels.numpy_digest import ROW_BYTES, weights_of_row
from consistency.numerics.kernels.numpy_distance import measure_by_numpy
from consistency.numerics.kernels.trust import (
    differs_in,
    digests_differ_in,
    errors_by_both,
    errors_differ_in,
    measure_by,
)
from tests.numerics.kernels.builds import BUILDS, compile_build, running
from tests.numerics.kernels.kernel_process import ProcessError

ROOT = Path(__file__).resolve().parents[3]

EDGES = sorted({1, 2, 3, 16, 17, *(edge + off for edge in (64, BLOCK, HARD_CHUNK, 3 * BLOCK) for off in (-1, 0, 1))})
"""Elements about the ends of vectors, blocks and chunks."""

FLAVOURS = ("close", "finite", "any")


def pair(kind: str, elements: int, flavour: str, stream: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make two tensors: neighbouring numbers; finite ones; and any bits, with all of the extremes and NaN payloads.

    Stretches of 64 elements are equal, off in few elements, or off in most.
    """
    dtype = named(kind)
    bits = np.dtype(f"i{dtype.itemsize}")
    if flavour == "close":
        e = bit_patterns(torch.from_numpy(stream.standard_normal(elements)).to(dtype)).numpy()
        a = e + stream.integers(-3, 4, elements).astype(bits)
    else:
        info = np.iinfo(bits)
        e, a = stream.integers(info.min, info.max, (2, elements), bits, endpoint=True)
        places = stream.random(elements) < 0.2
        extremes = [side[stream.integers(0, len(side), elements)] for side in hard_inputs._pairs_of_extremes(dtype)]
        e, a = (np.where(places, extreme, side) for extreme, side in zip(extremes, (e, a), strict=True))
    share = np.repeat(stream.choice([0.0, 0.05, 0.9], -(-elements // 64)), 64)[:elements]
    tensors = [
        torch.from_numpy(side.astype(bits)).view(dtype) for side in (np.where(stream.random(elements) < share, a, e), e)
    ]
    if flavour == "finite":
        tensors = [torch.where(torch.isfinite(side), side, 1) for side in tensors]
    return tensors[0], tensors[1]


def at_byte(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Copy a flat tensor to an address `offset` bytes past a multiple of 64; torch cannot view it so, NumPy can."""
    memory = np.empty(tensor.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    place = memory[start : start + tensor.nbytes]
    place[:] = tensor.view(torch.uint8).numpy()
    return torch.from_numpy(place.view(f"i{tensor.itemsize}")).view(tensor.dtype)


def stretch_of(kind: str, elements: int, flavour: str, stream: np.random.Generator) -> Iterator[Stretch]:
    """Yield a computed tensor and its exact values, without and with a base, by every kind of allowance."""
    a, e = pair(kind, elements, flavour, stream)
    exact = e.to(torch.float64).numpy()
    eps = torch.finfo(e.dtype).eps
    with np.errstate(all="ignore"):  # any bits
        exact = exact * (1 + stream.integers(-2, 3, elements) * eps / 2)
    base = torch.from_numpy(stream.standard_normal(elements)).to(e.dtype)
    size = np.abs(stream.standard_normal(elements)) + 0.5
    plain = Stretch(start=3, actual=a, value=exact)
    derived = Allowance(product=3 * eps, weight=2 * eps, floor=float(eps))
    user = UserAllowance(atol=eps, rtol=2 * eps)
    yield plain
    yield replace(plain, size=size)
    yield replace(plain, size=size, allowance=replace(derived, weight=0.0))
    yield replace(plain, allowance=user)
    merged = (a.to(torch.float64) + base.to(torch.float64)).to(e.dtype)
    yield replace(plain, actual=merged, base=base, size=size, allowance=derived)
    yield replace(plain, actual=merged, base=base, allowance=user)


def assert_measured_the_same(
    kernels: list[Kernel], a: torch.Tensor, e: torch.Tensor, *, parts: int, chunk: int
) -> None:
    seen = [measure_by(kernel, a, e, parts=parts, chunk=chunk) for kernel in kernels]
    assert differs_in(seen[0], measure_by_numpy(a, e, parts)) is None
    assert [repr(tally) for tally in seen] == [repr(seen[0])] * len(seen)


@pytest.mark.process
@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_size_is_measured_wherever_it_lies(kind: str, offset: int, variants: list[Kernel]) -> None:
    stream = np.random.default_rng(offset)
    for elements, flavour in itertools.product(EDGES, FLAVOURS):
        a, e = pair(kind, elements, flavour, stream)
        sides = at_byte(a, offset), at_byte(e, offset and offset + 2)
        for parts in (1, 2)[: 2 - elements % 2]:
            assert_measured_the_same(variants, *sides, parts=parts, chunk=HARD_CHUNK)


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_every_size_are_measured(kind: str, variants: list[Kernel]) -> None:
    stream = np.random.default_rng(7)
    for elements, flavour in itertools.product(EDGES, FLAVOURS):
        for stretch in stretch_of(kind, elements, flavour, stream):
            seen = [errors_by_both(kernel, stretch) for kernel in variants]
            assert [errors_differ_in(*both) for both in seen] == [None] * len(seen), (elements, flavour)
            assert [repr(found) for found, _ in seen] == [repr(seen[0][0])] * len(seen), (elements, flavour)


@pytest.mark.aarch64
@pytest.mark.parametrize("name", [name for name, build in BUILDS.items() if build.mark == "aarch64"])
def test_millions_of_numbers_are_seen_as_numpy_and_this_processor_see_them(
    name: str, kernel_library: Path, kernels_of: Callable[[str], list[Kernel]]
) -> None:
    if (reason := BUILDS[name].missing) is not None:
        pytest.skip(reason)
    kernels = [Kernel(kernel_library, variant=0), *kernels_of(name)]
    stream = np.random.default_rng(9)
    million = 1 << 20
    for kind, flavour in itertools.product(KINDS, FLAVOURS):
        a, e = pair(kind, million + 77, flavour, stream)
        assert_measured_the_same(kernels, a, e, parts=1, chunk=CHUNK)
        assert_measured_the_same(kernels, at_byte(a[:-1], 3), at_byte(e[:-1], 1), parts=2, chunk=CHUNK)
        for stretch in stretch_of(kind, million // 4 + 5, flavour, stream):
            seen = [errors_by_both(kernel, stretch) for kernel in kernels]
            assert [errors_differ_in(*both) for both in seen] == [None] * len(seen)
            assert [repr(found) for found, _ in seen] == [repr(seen[0][0])] * len(seen)
    raw = at_byte(torch.from_numpy(made_up(np.dtype(np.int64), 4 * million)).view(torch.uint8), 3).numpy()
    assert [digests_differ_in(kernel, raw) for kernel in kernels] == [None] * len(kernels)


@pytest.mark.aarch64
@pytest.mark.parametrize("name", [name for name, build in BUILDS.items() if build.mark == "aarch64"])
def test_products_fused_into_sums_would_be_seen(name: str, kernel_library: Path, tmp_path: Path) -> None:
    """Every aarch64 has such instructions: without -ffp-contract=off the compiler takes them."""
    if (reason := BUILDS[name].missing) is not None:
        pytest.skip(reason)
    a, e = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 32 * CHUNK)))  # one sum in five has other bits
    native = Kernel(kernel_library, variant=0)
    with running(BUILDS[name], compile_build(BUILDS[name], tmp_path, "-ffp-contract=fast")) as (fused,):
        sums, expected = (measure_by(kernel, a, e) for kernel in (fused, native))
    assert sums.sums == expected.sums
    assert sums.squares != expected.squares


@pytest.mark.aarch64
def test_a_wheel_says_for_which_processor_its_kernel_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = BUILDS["aarch64-gcc"]
    if (reason := build.missing) is not None:
        pytest.skip(reason)
    for package in ("hatchling", "elftools"):
        pytest.importorskip(package, reason=f"needs {package}, as `tox -e aarch64` has it")
    monkeypatch.setenv("CC", *build.compiler)
    monkeypatch.delenv(compiled.PLAIN_VARIABLE, raising=False)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-manylinux_2_17_aarch64.whl")
    kernel = zipfile.ZipFile(wheel).read("consistency/numerics/kernels/_kernel.so")
    assert kernel[18:20] == b"\xb7\0"  # e_machine of ELF: EM_AARCH64


@pytest.mark.usefixtures("kernel_library")  # skips where there is no compiler
def test_a_processor_of_the_other_byte_order_gets_none(tmp_path: Path) -> None:
    other = ("-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__")
    reason = compile_kernel(compiled.SOURCE, tmp_path / "other.so", *other)
    assert reason is not None
    assert "a big-endian machine takes the NumPy path" in reason


# --- what a sanitizer has to report ---------------------------------------------------------------------------------

DIGEST_SUM = "uint64_t sum = 0;\n        for (int i = 0; i < ROW_WORDS; i++) {"
PLANTED = {  # the builds that report it, its words, and what is planted
    "a read past the end": (
        ("address-gcc", "address-clang"),
        "heap-buffer-overflow",
        (DIGEST_SUM, DIGEST_SUM.replace("i < ROW_WORDS", "i < ROW_WORDS + (r + 1 == rows)")),
    ),
    "a write past the end": (
        ("address-gcc", "address-clang"),
        "heap-buffer-overflow",
        ("out[r] = sum;", "out[r + 1] = sum;"),
    ),
    "a signed sum that overflows": (
        ("address-gcc", "address-clang"),
        "signed integer overflow",
        ("out[r] = sum;", "const int64_t most = INT64_MAX + rows; out[r] = sum + (uint64_t)most;"),
    ),
    "memory that was never written": (
        ("memory-clang",),
        "use-of-uninitialized-value",
        (DIGEST_SUM, DIGEST_SUM.replace("sum = 0", "sum")),
    ),
    "memory of all threads": (
        ("thread-gcc", "thread-clang"),
        "data race",
        (DIGEST_SUM, "static uint64_t sum;\n        sum = 0;" + DIGEST_SUM.removeprefix("uint64_t sum = 0;")),
    ),
}


@pytest.mark.sanitizers
@pytest.mark.parametrize(
    ("build", "words", "change"),
    [pytest.param(b, words, change, id=f"{what}-{b}") for what, (bs, words, change) in PLANTED.items() for b in bs],
)
def test_a_planted_mistake_is_reported(
    build: str, words: str, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := BUILDS[build].missing) is not None:
        pytest.skip(reason)
    text = compiled.SOURCE.read_text(encoding="utf-8")
    assert text.count(change[0]) == 1
    source = tmp_path / "kernel.c"
    source.write_text(text.replace(*change), encoding="utf-8")
    monkeypatch.setattr(compiled, "SOURCE", source)
    library = compile_build(BUILDS[build], tmp_path, "-O0", "-DPLAIN_ONLY")
    rows = made_up(np.dtype(np.int64), 2 * ROW_BYTES // 8)
    out = np.empty(2, np.int64)
    with pytest.raises(ProcessError, match=words), running(BUILDS[build], library) as (kernel,):
        kernel.digest(rows.ctypes.data, 2, *weights_of_row(), out)
