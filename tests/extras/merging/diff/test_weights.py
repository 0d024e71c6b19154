"""Two weight files against one another: what differs is found to the bit and named, and nothing else is said."""

from __future__ import annotations

import math
import os
import tracemalloc
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from consistency.comparison.result import Comparison, Outcome
from consistency.errors import InputError
from consistency.extras.merging.diff.weights import diff_weights
from tests.made_weights import Given, f32, put

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16,
    "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Every dtype that a safetensors header can hold."""
if version("safetensors") < "0.8":
    BITS = {name: bits for name, bits in BITS.items() if not name.endswith("FNUZ")}  # the first that has these is 0.8

Sides = tuple[dict[str, Given], dict[str, Given]]


@pytest.fixture
def held(tmp_path: Path) -> Any:
    """Compare tensors that are written to two files first."""

    def compare(actual: dict[str, Given], expected: dict[str, Given], *, pad: int = 0) -> Comparison:
        return diff_weights(put(tmp_path / "b.safetensors", actual, pad=pad), put(tmp_path / "a.safetensors", expected))

    return compare


def rows(found: Comparison) -> dict[str, Outcome]:
    return {f"{t.layer}.{t.tensor}": t.outcomes[-1] for t in found.tensors}


def only(found: Comparison) -> Outcome:
    (row,) = rows(found).values()
    return row


def pattern(dtype: str, count: int = 64) -> bytes:
    raw = bytes((i * 37 + 11) % 251 for i in range(count * BITS[dtype] // 8))
    return bytes(byte % 2 for byte in raw) if dtype == "BOOL" else raw


# what is the same


@pytest.mark.parametrize("dtype", BITS)
def test_the_same_bytes_of_any_dtype_are_equal(held: Any, dtype: str) -> None:
    one = {"x.weight": (dtype, (8, 8), pattern(dtype))}
    found = held(one, one)
    assert (found.verdict, found.exit_status) == ("consistent", 0)
    assert [f.kind for f in found.findings] == (["non-finite-values"] if dtype in ("F16", "F8_E5M2") else [])
    assert only(found).status == "equal"
    assert only(found).mismatched == 0
    assert found.tensors[0].classes == (tuple(w.name for w in found.workers),)


def test_nan_payloads_that_are_the_same_are_equal(held: Any) -> None:
    nans = {"x.w": ("F32", (2,), bytes.fromhex("010080ff eeffc07f".replace(" ", "")))}
    assert held(nans, nans).verdict == "consistent"


def test_order_padding_and_metadata_do_not_count(held: Any) -> None:
    a, b = f32(1, 2), f32(3)
    assert held({"x.a": a, "x.b": b}, {"x.b": b, "x.a": a}, pad=3).verdict == "consistent"


def test_the_same_path_twice(tmp_path: Path) -> None:
    path = put(tmp_path / "a.safetensors", {"x.w": f32(1)})
    found = diff_weights(path, path)
    assert found.verdict == "consistent"
    assert found.reference == f"{path} (reference)"
    assert len({w.name for w in found.workers}) == 2


def test_zero_size_and_scalar(held: Any) -> None:
    side = {"x.empty": ("F32", (0, 4), b""), "x.odd": ("F4", (0,), b""), "x.scalar": f32(1, shape=())}
    assert {r.status for r in rows(held(side, side)).values()} == {"equal"}
    other = held({**side, "x.empty": ("F32", (4, 0), b""), "x.scalar": f32(2, shape=())}, side)
    assert rows(other)["x.empty"].word == "shape"
    assert rows(other)["x.odd"].status == "equal"
    scalar = rows(other)["x.scalar"]
    assert (scalar.status, scalar.worst_index, scalar.elements, scalar.mismatched) == ("outside", (), 1, 1)


# bits


@pytest.mark.parametrize("dtype", BITS)
def test_one_flipped_bit_is_found_with_tensor_index_and_bit(held: Any, dtype: str) -> None:
    """Bit 0 of byte 8: a mantissa's last bit, but for the one format that has none."""
    raw = pattern(dtype)
    wrong = bytearray(raw)
    wrong[8] ^= 1
    right = {"y.weight": f32(1, 2), "x.weight": (dtype, (64,), raw)}
    found = held({**right, "x.weight": (dtype, (64,), bytes(wrong))}, right)
    assert (found.verdict, found.exit_status) == ("inconsistent", 1)
    assert rows(found)["y.weight"].status == "equal"
    row = rows(found)["x.weight"]
    assert (row.status, row.mismatched, row.word) == ("outside", 1, "bit-flip")
    assert row.evidence["bits"] == [0]
    assert row.evidence["first_byte"] == row.evidence["last_byte"] == 8
    size = max(1, BITS[dtype] // 8)
    assert row.worst_index == (8 // size,)
    assert ("unit" in row.evidence) == (dtype in ("F4", "F6_E2M3", "F6_E3M2"))
    assert row.elements == (64 if "unit" not in row.evidence else len(raw))
    if dtype.startswith(("F", "BF", "C")) and "unit" not in row.evidence:
        assert row.evidence["fields"] == ["exponent" if dtype == "F8_E8M0" else "mantissa"]
    (finding,) = (finding for finding in found.findings if finding.severity == "error")
    assert finding.tensors == ("file::x.weight",)


def test_a_complex_numbers_parts_are_one_element(held: Any) -> None:
    right = np.arange(8, dtype="<c8")
    wrong = right.copy()
    wrong[5] += 1 + 1j
    row = only(held({"x.w": ("C64", (8,), wrong.tobytes())}, {"x.w": ("C64", (8,), right.tobytes())}))
    assert (row.mismatched, row.worst_index, row.elements) == (1, (5,), 8)


def test_an_exponent_without_a_sign_has_no_sign_bit(held: Any) -> None:
    row = only(held({"x.s": ("F8_E8M0", (2,), b"\x7e\x7f")}, {"x.s": ("F8_E8M0", (2,), b"\xfe\x7f")}))
    assert (row.max_ulp, row.evidence["fields"]) == (128, ["exponent"])


def test_the_word_of_each_difference(held: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4096).astype("<f4")

    def word(values: np.ndarray) -> str | None:
        side = (f32(*values), f32(*x))
        return only(held({"x.w": side[0]}, {"x.w": side[1]})).word

    sign = x.copy()
    sign[0] = 0
    assert word(np.zeros_like(x)) == "zeros"
    assert word(x * np.float32(1.5)) == "wrong-scale"
    assert word(x[::-1]) == "permuted"
    assert word(x.astype("<f2").astype("<f4")) == "rounded-to-fp16"
    block = x.copy()
    block[1024:2048] = rng.standard_normal(1024)
    assert word(block) == "block"
    assert only(held({"x.w": f32(-0.0, 1)}, {"x.w": f32(0.0, 1)})).word == "signed-zero"


def test_another_payload_of_nan_is_a_difference(held: Any) -> None:
    one, other = bytes.fromhex("0000c07f0000803f"), bytes.fromhex("0100c07f0000803f")
    row = only(held({"x.w": ("F32", (2,), other)}, {"x.w": ("F32", (2,), one)}))
    assert (row.status, row.mismatched, row.evidence["bits"], row.worst_index) == ("outside", 1, [0], (0,))
    assert float(row.max_abs or 0) == 0, "both are NaN: the numbers do not differ"


def test_nan_on_one_side_is_the_worst_of_all(held: Any) -> None:
    row = only(held({"x.w": f32(1, 2, float("nan"))}, {"x.w": f32(1, 1e38, 3)}))
    assert row.max_abs is not None
    assert np.isnan(row.max_abs)
    assert row.worst_index == (2,)
    assert row.max_ulp is None


# structure


def test_missing_and_unexpected(held: Any) -> None:
    found = held({"x.a": f32(1), "x.new": f32(2)}, {"x.a": f32(1), "x.gone": f32(2)})
    seen = rows(found)
    assert (seen["x.a"].status, seen["x.gone"].status, seen["x.new"].status) == ("equal", "missing", "unexpected")
    assert found.exit_status == 1
    classes = {t.tensor: t.classes for t in found.tensors}
    assert classes["gone"] == ((found.reference,),)
    assert classes["new"] == ((found.workers[1].name,),)
    assert {f.kind for f in found.findings} == {"missing", "unexpected"}


@pytest.mark.parametrize(("got", "wanted"), [((3, 1), (3,)), ((1, 3), (3, 1)), ((1,), ()), ((0,), (0, 0))])
def test_another_shape_is_never_broadcast(held: Any, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    values = [1.0] * int(np.prod(got))
    row = only(held({"x.w": f32(*values, shape=got)}, {"x.w": f32(*values, shape=wanted)}))
    assert (row.status, row.word, row.mismatched) == ("outside", "shape", None)
    assert row.evidence == {"got": list(got), "wanted": list(wanted)}


@pytest.mark.parametrize(
    ("actual", "got", "wanted"),
    [
        (("BF16", (2,), bytes.fromhex("803f0040")), "bfloat16", "float32"),  # 1 and 2, as the float32 has
        (("I32", (2,), np.array([1, 2], "<f4").tobytes()), "int32", "float32"),  # the same bytes
    ],
)
def test_another_dtype_is_never_cast(held: Any, actual: Given, got: str, wanted: str) -> None:
    row = only(held({"x.w": actual}, {"x.w": f32(1, 2)}))
    assert (row.status, row.word, row.evidence) == ("outside", "dtype", {"got": got, "wanted": wanted})


def test_swapped_tensors_are_named_with_the_others_name(held: Any) -> None:
    a, b = f32(*range(1, 20)), f32(*range(2, 21))
    found = held({"x.a": b, "x.b": a, "x.c": a}, {"x.a": a, "x.b": b, "x.c": a})
    assert {n: (r.word, r.evidence.get("holds")) for n, r in rows(found).items()} == {
        "x.a": ("swapped", "x.b"), "x.b": ("swapped", "x.a"), "x.c": (None, None),
    }  # fmt: skip
    (finding,) = found.findings
    assert "the bytes of another tensor in 2 of 3 tensors" in finding.message


def test_equal_beginnings_are_not_taken_for_swapped(held: Any) -> None:
    a = np.arange(64, dtype="<f4")
    c = a.copy()
    c[40:] += 0.3
    found = held({"x.a": f32(*c), "x.b": f32(*a)}, {"x.a": f32(*a), "x.b": f32(*a)})
    assert rows(found)["x.a"].word != "swapped"


@pytest.mark.parametrize("turned", [False, True])
def test_names_that_differ_by_a_prefix_are_told(held: Any, turned: bool) -> None:
    plain, prefixed = {"x.a": f32(1), "x.b": f32(2)}, {"model.x.a": f32(1), "model.x.b": f32(2)}
    found = held(*((plain, prefixed) if turned else (prefixed, plain)))
    (note,) = [f for f in found.findings if f.severity == "note"]
    assert "'model.'" in note.message
    assert found.exit_status == 1
    assert not [f for f in held({"x.a": f32(1)}, {"y.b": f32(1)}).findings if f.severity == "note"]


def test_no_tensor_on_either_side_is_no_agreement(held: Any) -> None:
    with pytest.raises(InputError, match="neither contains a tensor"):
        held({}, {})
    assert rows(held({}, {"x.w": f32(1)}))["x.w"].status == "missing"


def test_a_path_that_is_no_text_is_shown(tmp_path: Path) -> None:
    from consistency.report.json import as_bytes

    path = tmp_path / os.fsdecode(b"\xff.safetensors")
    found = diff_weights(put(path, {"x.w": f32(1)}), put(tmp_path / "a.safetensors", {"x.w": f32(2)}))
    assert b"\\\\xff.safetensors" in as_bytes(found)


# sizes


def test_a_difference_in_any_piece_is_seen(tmp_path: Path) -> None:
    """Files are compared in pieces of 8 MiB: the last byte, and those on both sides of each border."""
    size = 20 * 2**20 + 3
    wrong, right = (put(tmp_path / f"{n}.safetensors", {"x.w": ("U8", (size,), bytes(size))}) for n in range(2))
    start = wrong.stat().st_size - size
    for at in (0, 2**23 - 1, 2**23, 2**24 - 1, 2**24, size - 1):
        with wrong.open("r+b") as file:
            file.seek(start + at)
            file.write(b"\x01")
        row = only(diff_weights(wrong, right))
        assert (row.mismatched, row.worst_index) == (1, (at,))
        with wrong.open("r+b") as file:
            file.seek(start + at)
            file.write(b"\x00")


@pytest.mark.parametrize("pad", [0, 1, 2, 4])
def test_no_memory_of_the_size_of_the_files_is_taken(tmp_path: Path, pad: int) -> None:
    """Neither where tensors start at their own alignment, nor where a header's odd length puts them anywhere."""
    count = 8 * 2**20
    right = np.random.default_rng(0).standard_normal(count, np.float32)
    wrong = right.copy()
    wrong[::3] += 1
    paths = [
        # one element before it, so that the second begins at a multiple of 4 and none of 8
        put(tmp_path / f"{n}.safetensors", {"x.a": f32(1), "x.w": ("F32", (count,), raw.tobytes())}, pad=pad)
        for n, raw in enumerate((wrong, right))
    ]
    small = put(tmp_path / "small.safetensors", {"x.w": f32(1)})
    diff_weights(small, put(tmp_path / "other.safetensors", {"x.w": f32(2)}))  # imports torch, which takes memory once
    mismatched = int(np.count_nonzero(right != wrong))
    del right, wrong
    before = anonymous_bytes()
    tracemalloc.start()
    try:
        with peak_of_anonymous_bytes() as peak:
            row = rows(diff_weights(*paths))["x.w"]
        _, taken = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert row.mismatched == mismatched
    assert taken < 8 * 2**20, "a file has 32 MiB"
    assert peak[0] - before < 16 * 2**20


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1])


class peak_of_anonymous_bytes:  # noqa: N801 - reads as a function
    """Look at the process's anonymous memory at each call of a function of the package."""

    def __enter__(self) -> list[int]:
        import sys

        self.peak = [0]

        def look(frame: Any, event: str, _: Any) -> None:
            if event == "call" and "consistency" in frame.f_code.co_filename:
                self.peak[0] = max(self.peak[0], anonymous_bytes())

        sys.setprofile(look)
        return self.peak

    def __exit__(self, *_: object) -> None:
        import sys

        sys.setprofile(None)


@pytest.mark.parametrize("dtype", [d for d, bits in BITS.items() if bits > 8])
@pytest.mark.parametrize("pad", range(1, 8))
def test_tensors_that_start_anywhere_are_measured_alike(held: Any, dtype: str, pad: int) -> None:
    right = pattern(dtype)
    wrong = bytearray(right)
    wrong[-1] ^= 0x81
    sides = {"x.w": (dtype, (64,), bytes(wrong))}, {"x.w": (dtype, (64,), right)}
    assert only(held(*sides, pad=pad)).evidence == only(held(*sides)).evidence


# against NumPy

NUMBERS = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "U8": "u1", "I16": "<i2", "BF16": "<u2"}


@st.composite
def edited(draw: st.DrawFn) -> Sides:
    actual: dict[str, Given] = {}
    expected: dict[str, Given] = {}
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(NUMBERS)))
        shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
        raw = draw(st.binary(min_size=(n := int(np.prod(shape)) * BITS[dtype] // 8), max_size=n))
        wrong = bytearray(raw)
        for _ in range(draw(st.integers(0, 3)) if raw else 0):
            wrong[draw(st.integers(0, len(raw) - 1))] ^= draw(st.integers(0, 255))
        expected[f"x.t{i}"], actual[f"x.t{i}"] = (dtype, shape, raw), (dtype, shape, bytes(wrong))
    return actual, expected


@pytest.mark.slow
@hypothesis.given(edited())
@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_what_differs_is_what_numpy_says(tmp_path: Path, sides: Sides) -> None:
    actual, expected = sides
    found = diff_weights(put(tmp_path / "b.safetensors", actual), put(tmp_path / "a.safetensors", expected))
    seen = rows(found)
    assert seen.keys() == expected.keys()
    for name, (dtype, shape, raw) in expected.items():
        kind = np.dtype(f"u{BITS[dtype] // 8}")
        places = np.flatnonzero(np.frombuffer(actual[name][2], kind) != np.frombuffer(raw, kind))
        row = seen[name]
        assert (row.status == "outside") == (len(places) > 0)
        assert row.mismatched == len(places)
        if len(places):
            assert row.evidence["first_byte"] == places[0] * kind.itemsize
            assert row.evidence["last_byte"] == places[-1] * kind.itemsize
            assert row.worst_index is not None
            assert np.ravel_multi_index(row.worst_index, tuple(shape)) in places if shape else row.worst_index == ()
    assert (found.verdict == "consistent") == (actual == expected)


@pytest.mark.parametrize(("dtype", "start"), [("float32", 4), ("bfloat16", 2), ("complex64", 4), ("uint8", 1)])
def test_what_its_own_size_allows_is_read_where_it_lies(dtype: str, start: int) -> None:
    """Files that safetensors writes have tensors at any multiple of their own size: none of those is copied."""
    from consistency.numerics.stored import as_tensor

    raw = np.zeros(72, np.uint8)[start : start + 64]
    assert as_tensor(raw, (-1,), dtype).data_ptr() == raw.ctypes.data


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_equal_values_that_are_not_finite_are_warned_of(held: Any, value: float) -> None:
    same = {"x.w": f32(1.0, value), "y.w": f32(2.0)}
    found = held(same, same)
    assert (found.verdict, [f.severity for f in found.findings]) == ("consistent", ["warning"])
    assert found.findings[0].message == "values are NaN or infinite in both: 1 value of x.w"
    other = {"x.w": f32(1.0, 0.0), "y.w": f32(2.0)}
    message = next(f.message for f in held(other, same).findings if f.severity == "warning")
    assert "in both" not in message
    assert message.count("1 value of x.w") == 1


def bf16(*values: float) -> Given:
    return ("BF16", (len(values),), torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy().tobytes())


def test_another_dtype_is_said_to_be_rounded_or_not(held: Any) -> None:
    values = (1.0, 1 / 3, -7.123456)
    wide, half, off = f32(*values), bf16(*values), bf16(1.0, 1 / 3, -7.5)
    for sides, name in (((half, wide), "b.safetensors"), ((wide, half), "a.safetensors")):
        found = held({"x.w": sides[0]}, {"x.w": sides[1]})
        (note,) = (f.message for f in found.findings if f.severity == "note")
        assert note.startswith("1 of 1 tensor of another dtype in ")
        assert f"{name} is exactly " in note
        assert found.verdict == "inconsistent"
    found = held({"x.w": half, "y.w": off}, {"x.w": wide, "y.w": wide})
    assert rows(found)["y.w"].reason == "1 of 3 elements are not the reference rounded"
    assert [f.message[:30] for f in found.findings if f.severity == "note"] == ["1 of 2 tensors of another dtyp"]
