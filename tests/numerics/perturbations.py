"""The blind-spot set: what can be wrong with an otherwise equal tensor, and the word that each has to be given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    Perturbation(name="nothing", change=torch.clone, word=EQUAL),
    Perturbation(name="nothing; a NaN in both", change=torch.clone, word=EQUAL, dtypes=FLOATS, reference=holding(nan)),
    Perturbation(
        name="nothing; an infinity in both",
        change=torch.clone,
        word=EQUAL,
        dtypes=WITH_INFINITY,
        reference=holding(infinity),
    ),
    Perturbation(name="nothing; columns lie one after the other", change=another_layout, word=EQUAL),
    Perturbation(name="nothing; one element into its storage", change=from_the_middle, word=EQUAL),
    Perturbation(name="nothing; a parameter that wants a gradient", change=torch.nn.Parameter, word=EQUAL, dtypes=WIDE),
    Perturbation(
        name="nothing; conjugated twice, once lazily", change=conjugate_twice, word=EQUAL, dtypes=(torch.complex64,)
    ),
    Perturbation(name="nothing; no elements", change=torch.clone, word=EQUAL, reference=lambda d: numbers(d)[:0]),
)
"""What is no difference: here nothing may be said."""

_CARRY = "adding one to an odd number turns several bits, which no single event does"
_NOISE = "noise in the last place of moved bytes has no usual cause"
_NAN_BITS = "several bits of one element; that both are NaN stands in the measures, with both patterns"
_ONE = "one element, several bits: no cause is likelier than another; both values stand in the measures"

PERTURBATIONS = (
    # one element
    Perturbation(name="one element 1 ULP off", change=step_one, word="bit-flip", dtypes=NUMBERS, touched=1),
    Perturbation(
        name="one element 1 ULP off, with a carry",
        change=step_with_carry,
        word="differs",
        why=_CARRY,
        dtypes=NUMBERS,
        touched=1,
    ),
    Perturbation(
        name="one element 1 ULP off, of 2²⁴ + 3",
        change=step_one,
        word="bit-flip",
        dtypes=FLOAT32,
        reference=large,
        touched=1,
    ),
    Perturbation(
        name="last element of 21, lowest bit", change=flip(lowest, -1), word="bit-flip", reference=odd, touched=1
    ),
    Perturbation(name="a scalar, lowest bit", change=flip(lowest, 0), word="bit-flip", reference=scalar, touched=1),
    Perturbation(
        name="last dimension of 1, lowest bit",
        change=flip(lowest, PLACE),
        word="bit-flip",
        reference=column,
        touched=1,
    ),
    Perturbation(
        name="lowest bit, columns lie one after the other",
        change=lambda e: another_layout(flip(lowest, PLACE)(e)),
        word="bit-flip",
        touched=1,
    ),
    Perturbation(name="one sign flipped", change=flip(sign, PLACE), word="bit-flip", dtypes=FLOATS, touched=1),
    Perturbation(name="one exponent bit", change=flip(exponent, PLACE), word="bit-flip", dtypes=FLOATS, touched=1),
    Perturbation(
        name="one exponent bit, which makes a NaN",
        change=flip(top_exponent, PLACE),
        word="bit-flip",
        dtypes=FLOATS,
        reference=holding(below_two),
        touched=1,
    ),
    Perturbation(
        name="two bits of one element",
        change=two_bits_of_one,
        word="differs",
        why=_ONE,
        dtypes=NUMBERS,
        touched=1,
    ),
    Perturbation(
        name="one element 10⁴",
        change=ten_thousand,
        word="differs",
        why=_ONE,
        dtypes=(*WIDE, torch.float8_e5m2, torch.int64),
        touched=1,
    ),
    # zeros, NaN and infinity
    Perturbation(
        name="−0 for +0",
        change=flip(sign, PLACE),
        word="signed-zero",
        dtypes=FLOATS,
        reference=holding(zero),
        touched=1,
    ),
    Perturbation(
        name="another NaN payload, one bit",
        change=flip(lowest, PLACE),
        word="bit-flip",
        dtypes=WITH_INFINITY,  # e4m3fn has but one NaN of each sign
        reference=holding(nan),
        touched=1,
    ),
    Perturbation(
        name="another NaN payload, several bits",
        change=other_payload,
        word="differs",
        why=_NAN_BITS,
        dtypes=WIDE,  # the payload of a float8 has at most one bit
        reference=holding(nan),
        touched=1,
    ),
    Perturbation(
        name="NaN with the other sign",
        change=flip(sign, PLACE),
        word="bit-flip",
        dtypes=FLOATS,
        reference=holding(nan),
        touched=1,
    ),
    Perturbation(name="NaN for a number", change=nan_unlike_a_flip, word="non-finite", dtypes=FLOATS, touched=1),
    Perturbation(
        name="a number for NaN",
        change=put(lambda t: int(bits_of(another(t.dtype))[PLACE])),
        word="differs",
        why="`non-finite` is said of the tested tensor, and this one is finite; both values stand in the measures",
        dtypes=FLOATS,
        reference=holding(nan),
        touched=1,
    ),
    Perturbation(
        name="infinity with the other sign",
        change=flip(sign, PLACE),
        word="bit-flip",
        dtypes=WITH_INFINITY,
        reference=holding(infinity),
        touched=1,
    ),
    Perturbation(
        name="the largest number for infinity",
        change=largest_finite,
        word="differs",
        why="`non-finite` is said of the tested tensor, and this one is finite; both values stand in the measures",
        dtypes=WITH_INFINITY,
        reference=holding(infinity),
        touched=1,
    ),
    Perturbation(
        name="subnormal numbers flushed to zero",
        change=flush_subnormals,
        word="differs",
        why="the vocabulary has no word for it",
        dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        reference=with_subnormals,
        touched=205,
    ),
    # places
    Perturbation(name="two elements swapped", change=swap_elements, word="permuted", touched=2),
    Perturbation(name="two rows swapped", change=swap_rows, word="permuted"),
    Perturbation(name="shifted by one element", change=shift, word="permuted"),
    Perturbation(name="transposed, of equal shape", change=torch.t, word="permuted", reference=square),
    Perturbation(name="another tensor of the run", change=lambda e: another(e.dtype), word="swapped"),
    Perturbation(name="a row overwritten by its neighbour", change=repeat_row, word="block", dtypes=NUMBERS),
    # what hashes cancel
    Perturbation(
        name="the same bit flipped in two elements",
        change=flip(lowest, PLACE, OTHER_PLACE),
        word="bit-flip",
        dtypes=NUMBERS,
        touched=2,
    ),
    Perturbation(
        name="the sign flipped in two elements",
        change=flip(sign, PLACE, PLACE + 2),
        word="bit-flip",
        dtypes=FLOATS,
        touched=2,
    ),
    Perturbation(
        name="one element 1 ULP up, another 1 ULP down",
        change=step_up_and_down,
        word="bit-flip",
        dtypes=NUMBERS,
        touched=2,
    ),
    # many elements
    Perturbation(name="all zeros", change=torch.zeros_like, word="zeros"),
    Perturbation(name="the last 2048 numbers zero", change=cut_short, word="block", dtypes=NUMBERS),
    Perturbation(name="a page of another tensor", change=page_of_another, word="block", dtypes=NUMBERS),
    Perturbation(name="a page of random bytes", change=page_of_noise, word="block", dtypes=NUMBERS),
    Perturbation(
        name="all elements 1 ULP off",
        change=step_all,
        word="differs",
        why=_NOISE,
        dtypes=NUMBERS,
        touched=20_480,
    ),
    Perturbation(name="×4", change=in_float64(lambda x: x * 4), word="wrong-scale", dtypes=FLOATS),
    Perturbation(
        name="all signs flipped", change=in_float64(torch.neg), word="wrong-scale", dtypes=FLOATS, touched=20_480
    ),
    Perturbation(
        name="5·10⁻⁴ added everywhere",
        change=in_float64(lambda x: x + 5e-4),
        word="differs",
        why="the vocabulary has no word for a constant offset",
        dtypes=WIDE,
    ),
    Perturbation(
        name="conjugated, lazily",
        change=torch.conj,
        word="differs",
        why="the vocabulary has no word for it",
        dtypes=(torch.complex64,),
        touched=20_480,
    ),
    # roundings
    Perturbation(
        name="rounded through bfloat16",
        change=through(torch.bfloat16),
        word="rounded-to-bf16",
        dtypes=(torch.float64, torch.float32, torch.complex64, torch.float16),
    ),
    Perturbation(
        name="rounded through float16",
        change=through(torch.float16),
        word="rounded-to-fp16",
        dtypes=(torch.float64, torch.float32, torch.complex64, torch.bfloat16),
        reference=tiny,
    ),
    Perturbation(
        name="rounded to TF32",
        change=to_tf32,
        word="rounded-to-tf32",
        dtypes=(torch.float32, torch.complex64),
        reference=tiny,
    ),
    Perturbation(
        name="cut to TF32", change=cut_to_tf32, word="rounded-to-tf32", dtypes=(torch.float32, torch.complex64)
    ),
    Perturbation(
        name="cut to bfloat16",
        change=cut_to_bfloat16,
        word="rounded-to-bf16",
        dtypes=(torch.float32, torch.complex64),
    ),
    Perturbation(
        name="rounded through float32",
        change=through(torch.float32),
        word="differs",
        why="the vocabulary has no word for it",
        dtypes=(torch.float64,),
    ),
    Perturbation(
        name="rounded through float8_e4m3fn",
        change=through(torch.float8_e4m3fn),
        word="differs",
        why="the vocabulary has no word for it",
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
    ),
)
"""What is different at equal shape and dtype."""

STRUCTURE = (
    Perturbation(name="(n,) for (n, 1)", change=lambda e: e.reshape(-1), word="shape", reference=column),
    Perturbation(
        name="(1, n) for (n,)", change=lambda e: e.reshape(1, -1), word="shape", reference=lambda d: numbers(d)[0]
    ),
    Perturbation(
        name="float32 for bfloat16, of equal values", change=lambda e: e.float(), word="dtype", dtypes=(torch.bfloat16,)
    ),
    Perturbation(
        name="bfloat16 for float32, of equal values",
        change=lambda e: e.bfloat16(),
        word="dtype",
        dtypes=FLOAT32,
        reference=lambda d: numbers(torch.bfloat16).to(d),
    ),
    Perturbation(
        name="float64 for float32, of equal values", change=lambda e: e.double(), word="dtype", dtypes=FLOAT32
    ),
    Perturbation(
        name="bytes for booleans, of equal bits",
        change=lambda e: e.view(torch.uint8),
        word="dtype",
        dtypes=(torch.bool,),
    ),
)
"""What is different in shape or dtype, before any value is looked at."""
