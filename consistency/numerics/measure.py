"""The measured difference of a tensor from its reference, which the numerics return and records hold. No torch here."""

from __future__ import annotations

from typing import Any

import msgspec

from consistency.numerics.real import Real


# `gc=False`: decoded JSON holds no cycles, and a fleet has millions of these for the collector to walk in vain
class Measure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """The difference of a tensor from its reference. Values are exact; they are rounded where they are shown.

    Attributes
    ----------
    elements, mismatched : int
        Number of all elements, and of those whose bits differ from the reference. An exact reference is rounded to the
        tensor's dtype first.
    max_abs, mean_abs, rms : float
        Largest, mean and root mean square difference, in the tensors' own unit, computed in float64. NaN where one side
        alone is NaN.
    max_rel : float
        Largest difference divided by the magnitude of the reference; infinite where that is zero or the difference
        infinite.
    max_ulp : int or None
        Largest difference in units in the last place of the dtype; None where it is not defined (NaN on one side, or no
        floating-point numbers).
    ratio : float or None
        Largest difference divided by the tolerance of its element; None for a bitwise rule.
    allowed : float or None
        Tolerance of the worst element, in the tensors' own unit; None where its difference or its ratio is zero, or
        no number.
    worst_index : tuple of int or None
        Index of the worst element, by `ratio` or else by difference; None where all bits are equal.
    worst_actual, worst_expected : float or None
        Values of the worst element.
    worst_actual_bits, worst_expected_bits : str or None
        Bits of the worst element in hexadecimal, most significant digit first.
    flipped_bits : dict of int to int
        For a bitwise comparison, the number of elements that differ in a bit, by the bit; 0 is the least significant.
    first_byte, last_byte : int or None
        Offsets of the first and the last element that differs, in bytes from the start of the tensor.
    magnitude : float
        Largest finite magnitude of an exact reference; not measured where bits are compared.
    not_finite : int
        Number of elements whose exact reference is NaN or infinite. No error is known there, and the same NaN or
        infinity counts as no error. Not measured where bits are compared.
    """

    elements: int
    mismatched: int
    max_abs: Real
    mean_abs: Real
    rms: Real
    max_rel: Real
    max_ulp: int | None
    ratio: Real | None
    worst_index: tuple[int, ...] | None
    allowed: Real | None = None
    worst_actual: Real | None = None
    worst_expected: Real | None = None
    worst_actual_bits: str | None = None
    worst_expected_bits: str | None = None
    flipped_bits: dict[int, int] = {}
    first_byte: int | None = None
    last_byte: int | None = None
    magnitude: Real
    not_finite: int = 0

    def without_values(self) -> Measure:
        """Return the measure without the worst element's values: a third of its size, and shown only of mismatches."""
        return msgspec.structs.replace(
            self, worst_actual=None, worst_expected=None, worst_actual_bits=None, worst_expected_bits=None
        )

    def evidence(self) -> dict[str, Any]:
        """Return the evidence of a bitwise difference in a row: the worst element, flipped bits, the range of bytes."""
        fields: dict[str, Any] = {
            "actual": self.worst_actual,
            "expected": self.worst_expected,
            "actual_bits": self.worst_actual_bits,
            "expected_bits": self.worst_expected_bits,
            "flipped_bits": self.flipped_bits or None,
            "first_byte": self.first_byte,
            "last_byte": self.last_byte,
        }
        return {name: value for name, value in fields.items() if value is not None}
