"""The blind-spot set: what can be wrong with an otherwise equal tensor, and the word that each has to be given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import torch

from tests.numerics.edits import (
    Change,
    another_layout,
    conjugate_twice,
    cut_short,
    cut_to_bfloat16,
    cut_to_tf32,
    exponent,
    flip,
    flush_subnormals,
    from_the_middle,
    in_float64,
    largest_finite,
    lowest,
    nan_unlike_a_flip,
    other_payload,
    page_of_another,
    page_of_noise,
    put,
    repeat_row,
    shift,
    sign,
    step_all,
    step_one,
    step_up_and_down,
    step_with_carry,
    swap_elements,
    swap_rows,
    ten_thousand,
    through,
    to_tf32,
    top_exponent,
    two_bits_of_one,
)
from tests.numerics.references import (
    OTHER_PLACE,
    PLACE,
    Reference,
    another,
    below_two,
    bits_of,
    column,
    holding,
    infinity,
    large,
    nan,
    numbers,
    odd,
    scalar,
    square,
    tiny,
    with_subnormals,
    zero,
)

WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (*WIDE, *FLOAT8)
WITH_INFINITY = (*WIDE, torch.float8_e5m2)  # e4m3fn has none
NUMBERS = (*FLOATS, torch.int8, torch.int64)
ALL = (*NUMBERS, torch.bool)
FLOAT32 = (torch.float32,)

EQUAL = "equal"
"""The word of no difference: nothing may be said."""


@dataclass(frozen=True, slots=True)
class Perturbation:
    """One thing that is wrong with an otherwise equal tensor.

    Attributes
    ----------
    name : str
        What was done.
    change : callable
        From the expected tensor to the actual one; leaves the expected one alone.
    word : str
        Of the report's vocabulary, or `EQUAL`.
    why : str
        Why there is no better word than `differs`.
    dtypes : tuple of torch.dtype
        For which the change makes sense.
    reference : callable
        From a dtype to the expected tensor.
    touched : int or None
        How many elements are altered by construction; None where it depends on the numbers.
    """

    name: str
    change: Change
    word: str
    _: KW_ONLY
    why: str = ""
    dtypes: tuple[torch.dtype, ...] = ALL
    reference: Reference = numbers
    touched: int | None = None


def cases(perturbations: tuple[Perturbation, ...]) -> Iterator[tuple[Perturbation, torch.dtype]]:
    """Yield every perturbation with every dtype for which it makes sense."""
    for perturbation in perturbations:
        for dtype in perturbation.dtypes:
            yield perturbation, dtype


HARMLESS = (
    Perturbation("nothing", torch.clone, EQUAL),
    Perturbation("nothing; a NaN in both", torch.clone, EQUAL, dtypes=FLOATS, reference=holding(nan)),
    Perturbation("nothing; an infinity in both", torch.clone, EQUAL, dtypes=WITH_INFINITY, reference=holding(infinity)),
    Perturbation("nothing; columns lie one after the other", another_layout, EQUAL),
    Perturbation("nothing; one element into its storage", from_the_middle, EQUAL),
    Perturbation("nothing; a parameter that wants a gradient", torch.nn.Parameter, EQUAL, dtypes=WIDE),
    Perturbation("nothing; conjugated twice, once lazily", conjugate_twice, EQUAL, dtypes=(torch.complex64,)),
    Perturbation("nothing; no elements", torch.clone, EQUAL, reference=lambda d: numbers(d)[:0]),
)
"""What is no difference: here nothing may be said."""

_CARRY = "adding one to an odd number turns several bits, which no single event does"
_NOISE = "noise in the last place of moved bytes has no usual cause"
_NAN_BITS = "several bits of one element; that both are NaN stands in the measures, with both patterns"
_NO_WORD = "the vocabulary has no word for it"
_FINITE = "`non-finite` is said of the tested tensor, and this one is finite; both values stand in the measures"
_ONE = "one element, several bits: no cause is likelier than another; both values stand in the measures"

PERTURBATIONS = (
    # one element
    Perturbation("one element 1 ULP off", step_one, "bit-flip", dtypes=NUMBERS, touched=1),
    Perturbation(
        "one element 1 ULP off, with a carry", step_with_carry, "differs", why=_CARRY, dtypes=NUMBERS, touched=1
    ),
    Perturbation("one element 1 ULP off, of 2²⁴ + 3", step_one, "bit-flip", dtypes=FLOAT32, reference=large, touched=1),
    Perturbation("last element of 21, lowest bit", flip(lowest, -1), "bit-flip", reference=odd, touched=1),
    Perturbation("a scalar, lowest bit", flip(lowest, 0), "bit-flip", reference=scalar, touched=1),
    Perturbation("last dimension of 1, lowest bit", flip(lowest, PLACE), "bit-flip", reference=column, touched=1),
    Perturbation(
        "lowest bit, columns lie one after the other",
        lambda e: another_layout(flip(lowest, PLACE)(e)),
        "bit-flip",
        touched=1,
    ),
    Perturbation("one sign flipped", flip(sign, PLACE), "bit-flip", dtypes=FLOATS, touched=1),
    Perturbation("one exponent bit", flip(exponent, PLACE), "bit-flip", dtypes=FLOATS, touched=1),
    Perturbation(
        "one exponent bit, which makes a NaN",
        flip(top_exponent, PLACE),
        "bit-flip",
        dtypes=FLOATS,
        reference=holding(below_two),
        touched=1,
    ),
    Perturbation("two bits of one element", two_bits_of_one, "differs", why=_ONE, dtypes=NUMBERS, touched=1),
    Perturbation(
        "one element 10⁴", ten_thousand, "differs", why=_ONE, dtypes=(*WIDE, torch.float8_e5m2, torch.int64), touched=1
    ),
    # zeros, NaN and infinity
    Perturbation("−0 for +0", flip(sign, PLACE), "signed-zero", dtypes=FLOATS, reference=holding(zero), touched=1),
    Perturbation(
        "another NaN payload, one bit",
        flip(lowest, PLACE),
        "bit-flip",
        dtypes=WITH_INFINITY,  # e4m3fn has but one NaN of each sign
        reference=holding(nan),
        touched=1,
    ),
    Perturbation(
        "another NaN payload, several bits",
        other_payload,
        "differs",
        why=_NAN_BITS,
        dtypes=WIDE,  # the payload of a float8 has at most one bit
        reference=holding(nan),
        touched=1,
    ),
    Perturbation(
        "NaN with the other sign", flip(sign, PLACE), "bit-flip", dtypes=FLOATS, reference=holding(nan), touched=1
    ),
    Perturbation("NaN for a number", nan_unlike_a_flip, "non-finite", dtypes=FLOATS, touched=1),
    Perturbation(
        "a number for NaN",
        put(lambda t: int(bits_of(another(t.dtype))[PLACE])),
        "differs",
        why=_FINITE,
        dtypes=FLOATS,
        reference=holding(nan),
        touched=1,
    ),
    Perturbation(
        "infinity with the other sign",
        flip(sign, PLACE),
        "bit-flip",
        dtypes=WITH_INFINITY,
        reference=holding(infinity),
        touched=1,
    ),
    Perturbation(
        "the largest number for infinity",
        largest_finite,
        "differs",
        why=_FINITE,
        dtypes=WITH_INFINITY,
        reference=holding(infinity),
        touched=1,
    ),
    Perturbation(
        "subnormal numbers flushed to zero",
        flush_subnormals,
        "differs",
        why=_NO_WORD,
        dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        reference=with_subnormals,
        touched=205,
    ),
    # places
    Perturbation("two elements swapped", swap_elements, "permuted", touched=2),
    Perturbation("two rows swapped", swap_rows, "permuted"),
    Perturbation("shifted by one element", shift, "permuted"),
    Perturbation("transposed, of equal shape", torch.t, "permuted", reference=square),
    Perturbation("another tensor of the run", lambda e: another(e.dtype), "swapped"),
    Perturbation("a row overwritten by its neighbour", repeat_row, "block", dtypes=NUMBERS),
    # what hashes cancel
    Perturbation(
        "the same bit flipped in two elements", flip(lowest, PLACE, OTHER_PLACE), "bit-flip", dtypes=NUMBERS, touched=2
    ),
    Perturbation(
        "the sign flipped in two elements", flip(sign, PLACE, PLACE + 2), "bit-flip", dtypes=FLOATS, touched=2
    ),
    Perturbation("one element 1 ULP up, another 1 ULP down", step_up_and_down, "bit-flip", dtypes=NUMBERS, touched=2),
    # many elements
    Perturbation("all zeros", torch.zeros_like, "zeros"),
    Perturbation("the last 2048 numbers zero", cut_short, "block", dtypes=NUMBERS),
    Perturbation("a page of another tensor", page_of_another, "block", dtypes=NUMBERS),
    Perturbation("a page of random bytes", page_of_noise, "block", dtypes=NUMBERS),
    Perturbation("all elements 1 ULP off", step_all, "differs", why=_NOISE, dtypes=NUMBERS, touched=20_480),
    Perturbation("×4", in_float64(lambda x: x * 4), "wrong-scale", dtypes=FLOATS),
    Perturbation("all signs flipped", in_float64(torch.neg), "wrong-scale", dtypes=FLOATS, touched=20_480),
    Perturbation(
        "5·10⁻⁴ added everywhere",
        in_float64(lambda x: x + 5e-4),
        "differs",
        why="the vocabulary has no word for a constant offset",
        dtypes=WIDE,
    ),
    Perturbation(
        "conjugated, lazily",
        torch.conj,
        "differs",
        why=_NO_WORD,
        dtypes=(torch.complex64,),
        touched=20_480,
    ),
    # roundings
    Perturbation(
        "rounded through bfloat16",
        through(torch.bfloat16),
        "rounded-to-bf16",
        dtypes=(torch.float64, torch.float32, torch.complex64, torch.float16),
    ),
    Perturbation(
        "rounded through float16",
        through(torch.float16),
        "rounded-to-fp16",
        dtypes=(torch.float64, torch.float32, torch.complex64, torch.bfloat16),
        reference=tiny,
    ),
    Perturbation(
        "rounded to TF32", to_tf32, "rounded-to-tf32", dtypes=(torch.float32, torch.complex64), reference=tiny
    ),
    Perturbation("cut to TF32", cut_to_tf32, "rounded-to-tf32", dtypes=(torch.float32, torch.complex64)),
    Perturbation("cut to bfloat16", cut_to_bfloat16, "rounded-to-bf16", dtypes=(torch.float32, torch.complex64)),
    Perturbation(
        "rounded through float32",
        through(torch.float32),
        "differs",
        why=_NO_WORD,
        dtypes=(torch.float64,),
    ),
    Perturbation(
        "rounded through float8_e4m3fn",
        through(torch.float8_e4m3fn),
        "differs",
        why=_NO_WORD,
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
    ),
)
"""What is different at equal shape and dtype."""

STRUCTURE = (
    Perturbation("(n,) for (n, 1)", lambda e: e.reshape(-1), "shape", reference=column),
    Perturbation("(1, n) for (n,)", lambda e: e.reshape(1, -1), "shape", reference=lambda d: numbers(d)[0]),
    Perturbation("float32 for bfloat16, of equal values", lambda e: e.float(), "dtype", dtypes=(torch.bfloat16,)),
    Perturbation(
        "bfloat16 for float32, of equal values",
        lambda e: e.bfloat16(),
        "dtype",
        dtypes=FLOAT32,
        reference=lambda d: numbers(torch.bfloat16).to(d),
    ),
    Perturbation("float64 for float32, of equal values", lambda e: e.double(), "dtype", dtypes=FLOAT32),
    Perturbation("bytes for booleans, of equal bits", lambda e: e.view(torch.uint8), "dtype", dtypes=(torch.bool,)),
)
"""What is different in shape or dtype, before any value is looked at."""
