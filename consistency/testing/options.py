"""The options of the public functions, and the values that each may have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from consistency.devices.products import Products
from consistency.errors import UsageError
from consistency.numerics.precision import Precision
from consistency.testing.call_inputs import TESTED

Choice = Literal["fail", "skip", "pass"]
"""Outcome of a test that is inconclusive."""

_HALF_TYPES = ("float16", "bfloat16")
"""Names of the dtypes in which partial sums may be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """Allowances for an implementation, beyond rounding to nearest in float32.

    Attributes
    ----------
    products : Products, optional
        Precision in which products may be computed, such as TF32 or partial sums in a half type. By default it is the
        precision that torch's settings in force permit on the device.
    toward_zero : bool
        Sums of float32 may be truncated: K additions then make an error of K units, where rounding to nearest makes one
        of the root of K.
    nan : bool
        The reference may be NaN. A result is right there if it is NaN in the same places.
    dtype : bool
        A result may have another dtype than the reference returns for the same inputs: a kernel may return a half type,
        and its reference float32. The result is judged by the rounding of its own dtype.
    contiguous : bool
        Incoming gradients may be contiguous in each call: a kernel may need them so, although autograd gives it others.
    inconclusive : {"fail", "skip", "pass"}
        Outcome of a test whose results are within rounding, where rounding may be more than a tenth of the values.
    """

    products: Products | None = None
    toward_zero: bool = False
    nan: bool = False
    dtype: bool = False
    contiguous: bool = False
    inconclusive: Choice = "fail"

    def __post_init__(self) -> None:
        """Refuse a value that is not one of those above: a misspelt one could be taken for one that allows more."""
        for name in ("toward_zero", "nan", "dtype", "contiguous"):
            _check_truth_value(f"Allow({name}=)", getattr(self, name))
        if self.inconclusive not in get_args(Choice):
            raise _unusable("Allow(inconclusive=)", self.inconclusive, ", ".join(get_args(Choice)))
        if self.products is not None:
            _check_products(self.products)


def _unusable(where: str, got: object, wanted: str) -> UsageError:
    """Return the error of an option's value: unrefused, it would be taken for another one, or fail far from here."""
    return UsageError("this value cannot be used", where=where, got=repr(got), wanted=wanted)


def _check_truth_value(where: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _unusable(where, value, "True or False")


def _check_products(products: object) -> None:
    """Raise an error unless each field of `Products` has a value of its kind."""
    where = "Allow(products=)"
    if not isinstance(products, Products):
        raise _unusable(where, products, "consistency.testing.Products(...)")
    for precision in (products.matmul, products.convolution):
        if not isinstance(precision, Precision):
            raise _unusable(where, precision, "a consistency.testing.Precision, such as Precision.TF32")
    for dtype, terms in products.partial_terms.items():
        if dtype not in _HALF_TYPES:
            raise _unusable(where, dtype, f"partial_terms of {', '.join(_HALF_TYPES)}")
        if not _is_whole(terms, least=1):
            raise _unusable(where, terms, f"partial_terms of 1 or more for {dtype}")


def _is_whole(value: object, *, least: int) -> bool:
    """Report whether a value is a whole number of at least this; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_names(where: str, value: object) -> None:
    """Raise an error unless a value is a collection of numbers and names; a string would be one of letters."""
    wanted = "numbers or names of inputs in a list or tuple, such as [0]"
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise _unusable(where, value, wanted)
    for name in value:
        if not isinstance(name, str) and not _is_whole(name, least=0):
            raise _unusable(where, name, wanted)


def check_options(
    function: object,
    *,
    reference: object = None,
    device: torch.device | str | None,
    dtype: object,
    gradients: object = True,
    passes: object,
    allow: object,
) -> None:
    """Raise an error that names the option whose value cannot be used."""
    if not callable(function):
        raise _unusable("function", type(function), "a function or a module")
    if reference is not None and not callable(reference):
        raise _unusable("reference=", type(reference), "a function or a module")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in TESTED):
        raise _unusable("dtype=", dtype, ", ".join(sorted(map(str, TESTED))))
    _check_truth_value("gradients=", gradients)
    if not _is_whole(passes, least=2):
        raise _unusable("passes=", passes, "2 or more: one pass shows no spread")
    if allow is not None and not isinstance(allow, Allow):
        raise _unusable("allow=", allow, "consistency.testing.Allow(...)")
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise _unusable("device=", device, "a torch.device or its name, such as cuda:0") from error


def check_calls(*, calls: object, strides: object, consumes: object, nondeterministic: object) -> None:
    """Raise an error that names the option of the calls of a function whose value cannot be used."""
    if not _is_whole(calls, least=1):
        raise _unusable("calls=", calls, "1 or more")
    _check_truth_value("strides=", strides)
    if nondeterministic is not None:
        _check_truth_value("nondeterministic=", nondeterministic)
    _check_names("consumes=", consumes)
