"""Every perturbation of the blind-spot set is seen, counted and named, and what is no difference is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from benchmarks.blind_spots import PAGE, SET, our_word, table_of_words
from benchmarks.generated_parts import replaced
from consistency.errors import StructureError
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.dtype import name_of
from consistency.numerics.measure import Measure
from tests.numerics.perturbations import ALL, EQUAL, FLOATS, HARMLESS, PERTURBATIONS, STRUCTURE, Perturbation, cases
from tests.numerics.references import bits_of

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True, kw_only=True)
class Comparer:
    """The three answers that are tested, so that a blind one can be put in the place of each."""

    differs: Callable[[torch.Tensor, torch.Tensor], bool]
    measure: Callable[[torch.Tensor, torch.Tensor], Measure]
    word: Callable[[Perturbation, torch.dtype], str]


OURS = Comparer(differs=lambda a, e: digest(a).value != digest(e).value, measure=measure, word=our_word)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What `measure` has to say, worked out from the bits in NumPy."""

    mismatched: int
    max_abs: float
    worst: frozenset[tuple[int, ...]]
    flipped_bits: dict[int, int]


def truth(actual: torch.Tensor, expected: torch.Tensor) -> Truth:
    x, y = bits_of(actual), bits_of(expected)
    parts = 2 if expected.is_complex() else 1
    places = np.flatnonzero(x != y)
    a, e = numbers_of(actual)[places], numbers_of(expected)[places]
    with np.errstate(invalid="ignore"):
        off = np.where((a == e) | (np.isnan(a) & np.isnan(e)), 0.0, np.abs(a - e))
    greatest = (np.nan if np.isnan(off).any() else off.max()) if places.size else 0.0
    worst = places[np.isnan(off) if np.isnan(greatest) else off == greatest]
    flipped = x[places] ^ y[places]
    counts = {bit: int(np.count_nonzero(flipped >> bit & 1)) for bit in range(8 * x.itemsize)}
    return Truth(
        mismatched=np.unique(places // parts).size,
        max_abs=float(greatest),
        worst=frozenset(tuple(map(int, np.unravel_index(i // parts, expected.shape))) for i in worst),
        flipped_bits={bit: count for bit, count in counts.items() if count},
    )


def numbers_of(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().resolve_conj()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).to(torch.float64).numpy().reshape(-1)


def complaints(
    perturbation: Perturbation, dtype: torch.dtype, comparer: Comparer, *, about: str = "digest measure word"
) -> set[str]:
    """Say what is wrong with a comparer's answers to one perturbation."""
    expected = perturbation.reference(dtype)
    actual = perturbation.change(expected)
    found = set()
    if "digest" in about and comparer.differs(actual, expected) != (perturbation.word != EQUAL):
        found.add("digest")
    if "measure" in about and perturbation not in STRUCTURE:
        wanted = truth(actual, expected)
        touched = wanted.mismatched if perturbation.touched is None else perturbation.touched
        measured = comparer.measure(actual, expected)
        found |= miscounted(measured, wanted, touched=touched)
        if dtype in FLOATS and " 1 ULP" in perturbation.name and measured.max_ulp != 1:
            found.add("ulp")
    if "word" in about and comparer.word(perturbation, dtype) != perturbation.word:
        found.add("word")
    return found


def miscounted(found: Measure, wanted: Truth, *, touched: int) -> set[str]:
    right = {
        "elements": found.mismatched == wanted.mismatched == touched,
        "max_abs": np.array_equal(float(found.max_abs), wanted.max_abs, equal_nan=True),
        "worst": found.worst_index in wanted.worst if wanted.worst else found.worst_index is None,
        "bits": found.flipped_bits == wanted.flipped_bits,
    }
    return {name for name, so in right.items() if not so}


# --- findings -------------------------------------------------------------------------------------------------------

KNOWN = {
    ("rounded through float16", torch.bfloat16): "float16 has all of bfloat16's digits: a few numbers alone change",
}
"""What is named wrongly, and why."""


def params(perturbations: tuple[Perturbation, ...]) -> list[ParameterSet]:
    found = []
    for perturbation, dtype in cases(perturbations):
        reason = KNOWN.get((perturbation.name, dtype))
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        found.append(pytest.param(perturbation, dtype, id=f"{perturbation.name}-{name_of(dtype)}", marks=marks))
    return found


# --- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("perturbation", "dtype"), params(HARMLESS))
def test_what_is_no_difference_is_none(perturbation: Perturbation, dtype: torch.dtype) -> None:
    assert complaints(perturbation, dtype, OURS) == set()


@pytest.mark.parametrize(("perturbation", "dtype"), params((*PERTURBATIONS, *STRUCTURE)))
def test_every_perturbation_is_seen_counted_and_named(perturbation: Perturbation, dtype: torch.dtype) -> None:
    assert complaints(perturbation, dtype, OURS) == set()


def test_what_is_named_wrongly_is_still_seen_and_counted() -> None:
    known = [(p, dtype) for p, dtype in cases(PERTURBATIONS) if (p.name, dtype) in KNOWN]
    assert len(known) == len(KNOWN)
    assert set().union(*(complaints(*case, OURS) for case in known)) <= {"word"}


@pytest.mark.parametrize(("perturbation", "dtype"), params(STRUCTURE))
def test_no_number_is_put_on_another_structure(perturbation: Perturbation, dtype: torch.dtype) -> None:
    expected = perturbation.reference(dtype)
    with pytest.raises(StructureError):
        measure(perturbation.change(expected), expected)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_the_set_does_what_it_says(dtype: torch.dtype) -> None:
    for perturbation in (*HARMLESS, *PERTURBATIONS):
        if dtype in perturbation.dtypes and "2²⁴" not in perturbation.name:
            expected = perturbation.reference(dtype)
            before = bits_of(expected)
            actual = perturbation.change(expected)
            assert (actual.shape, actual.dtype) == (expected.shape, dtype)
            assert np.array_equal(bits_of(expected), before), perturbation.name
            assert np.array_equal(bits_of(actual), before) == (perturbation.word == EQUAL), perturbation.name


def test_unknown_has_a_reason_and_nothing_else_has_one() -> None:
    assert all((p.word == "differs") == bool(p.why) for p in SET)
    names = [p.name for p in SET]
    assert len(set(names)) == len(names)
    assert {name for name, _ in KNOWN} <= set(names)


# --- the tests can fail ---------------------------------------------------------------------------------------------


def caught(blind: Comparer, what: str, *, about: str) -> set[str]:
    """Return the perturbations of a float32 tensor to which a comparer gives a wrong answer; ours gives none."""
    asked = [p for p in SET if torch.float32 in p.dtypes and "2²⁴" not in p.name]
    return {p.name for p in asked if what in complaints(p, torch.float32, blind, about=about)}


@pytest.mark.parametrize(
    ("differs", "wrong"),
    [
        (lambda a, e: not torch.equal(a, e), {"−0 for +0", "nothing; a NaN in both"}),
        (
            lambda a, e: a.shape != e.shape or a.dtype != e.dtype or not torch.allclose(a, e, equal_nan=True),
            {"−0 for +0", "one element 1 ULP off", "all elements 1 ULP off", "another NaN payload, one bit"},
        ),
        (
            lambda a, e: not np.array_equal(np.sort(bits_of(a)), np.sort(bits_of(e))),
            {"two elements swapped", "two rows swapped", "transposed, of equal shape", "(n,) for (n, 1)"},
        ),
        (
            lambda a, e: np.bitwise_xor.reduce(bits_of(a)) != np.bitwise_xor.reduce(bits_of(e)),
            {"the same bit flipped in two elements", "the sign flipped in two elements", "two elements swapped"},
        ),
        (
            lambda a, e: bits_of(a).sum() != bits_of(e).sum(),
            {"one element 1 ULP up, another 1 ULP down", "two elements swapped"},
        ),
    ],
    ids=["torch.equal", "allclose", "sorted", "xor", "sum"],
)
def test_a_blind_comparer_is_caught(differs: Callable[[torch.Tensor, torch.Tensor], bool], wrong: set[str]) -> None:
    assert wrong <= caught(dataclasses.replace(OURS, differs=differs), "digest", about="digest")


def without_nan(actual: torch.Tensor, expected: torch.Tensor) -> Measure:
    return measure(actual.nan_to_num(), expected.nan_to_num())


def as_numbers(actual: torch.Tensor, expected: torch.Tensor) -> Measure:
    found = measure(actual, expected)
    return msgspec.structs.replace(found, mismatched=int(torch.count_nonzero(actual != expected)))


@pytest.mark.parametrize(
    ("blind", "what", "wrong"),
    [
        (without_nan, "max_abs", {"NaN for a number", "a number for NaN"}),
        (as_numbers, "elements", {"−0 for +0", "nothing; a NaN in both"}),
        (
            lambda a, e: msgspec.structs.replace(measure(a, e), worst_index=(0, 0)),
            "worst",
            {"nothing", "one element 1 ULP off", "×4"},
        ),
        (lambda a, e: msgspec.structs.replace(measure(a, e), flipped_bits={}), "bits", {"one sign flipped"}),
        (lambda a, e: msgspec.structs.replace(measure(a, e), max_ulp=2), "ulp", {"all elements 1 ULP off"}),
    ],
    ids=["NaN", "elements", "worst", "bits", "ulp"],
)
def test_a_wrong_count_is_caught(
    blind: Callable[[torch.Tensor, torch.Tensor], Measure], what: str, wrong: set[str]
) -> None:
    assert wrong <= caught(dataclasses.replace(OURS, measure=blind), what, about="measure")


def test_a_wrong_word_is_caught() -> None:
    named = {p.name for p in SET if torch.float32 in p.dtypes and "2²⁴" not in p.name and p.word != "differs"}
    assert caught(dataclasses.replace(OURS, word=lambda *_: "differs"), "word", about="word") == named


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_code_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert replaced(page, "words", table_of_words()) == page, "run: python -m benchmarks.blind_spots --write --words"


@pytest.mark.parametrize("part", ["torch", "summaries"])
def test_the_tables_of_the_others_have_our_words(part: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.split(f"<!-- generated: {part} -->")[1].split("<!-- end:")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("|")]
    asked = [p for p in SET if torch.float32 in p.dtypes]
    assert rows[2:-1] == [[p.name, our_word(p, torch.float32)] for p in asked]
    assert rows[-1] == ["in bold", "0"]


def test_what_has_no_place_on_the_page_is_refused() -> None:
    with pytest.raises(ValueError, match="no marks <!-- generated: words -->"):
        replaced("a page", "words", "a table")
