"""Results of `magnitude_prune` and `ties`, by PEFT's own functions in float64; and the rounding of weighted sums.

Both types keep the largest elements of each factor by magnitude, and `ties` then elects a sign for each element. Where
elements are equally large at the limit, any of them may be kept, and the sign of a sum of three and more may depend on
its rounding: then float64 may choose other elements than a healthy device, and the device is compared with other
workers alone.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np
import torch

from consistency.devices.products import Products
from consistency.numerics.bound import gamma
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.file_tensor import Readable
from consistency.numerics.rules import RoundingError
from consistency.numerics.running_error import Arithmetic, Tracked
from consistency.worker import cpu_error

PRUNED = ("magnitude_prune", "ties")

DENSITY = 0.7
"""Share of the elements that are kept: not a half, which could not be told from the share of those left out."""


def undetermined(kind: str, tensors: Sequence[np.ndarray]) -> str:
    """Return why float64 may choose other elements than a healthy device; empty where it cannot.

    Parameters
    ----------
    kind : str
        One of `PRUNED`.
    tensors : sequence of np.ndarray
        The factor of each adapter, as stored in the dtype of the factors.
    """
    if kind == "ties" and len(tensors) > 2:
        return "which sign three adapters and more elect may depend on the rounding of their sum"
    for tensor in tensors:
        sizes = np.sort(np.abs(tensor), axis=None)
        left_out = sizes.size - int(DENSITY * sizes.size)
        if 0 < left_out < sizes.size and sizes[left_out - 1] == sizes[left_out] > 0:
            return "elements are equally large where the smaller ones are left out: any of them may be kept"
    return ""


def by_peft(kind: str, tensors: Sequence[np.ndarray], weights: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Return PEFT's combination of factors of one shape, computed on the CPU in a dtype."""
    from peft.utils import merge_utils

    factors = [torch.from_numpy(tensor).to(dtype) for tensor in tensors]
    combined: torch.Tensor = getattr(merge_utils, kind)(factors, torch.tensor(weights), DENSITY)
    return combined


def rounding_of(combine: Callable[[], torch.Tensor], exact: torch.Tensor, products: Products) -> RoundingError:
    """Return the error that rounding makes in the result of `combine`; every element has an error of its own."""

    def errors(computed: Readable, _: Readable = exact) -> int:
        assert isinstance(computed, torch.Tensor)
        wrong = int(torch.count_nonzero(computed.to(torch.float64) - exact))
        return wrong or exact.numel()  # every element is right where all are zeros, as in an untrained factor

    passes = cpu_error.passes_for(exact.numel())
    drawn = cpu_error.draw(products, passes, combine, lambda computed: {"factor": errors(computed)})
    return cpu_error.rounding_error(drawn, exact, errors)


def sum_of(by: Arithmetic, tensors: Sequence[np.ndarray], weights: Sequence[float]) -> Tracked:
    """Return the weighted sum of tensors, each product stored."""
    pairs = zip(tensors, weights, strict=True)
    terms = [(by.known(tensor) * weight_of(by, weight)).store() for tensor, weight in pairs]
    return functools.reduce(operator.add, terms).store()


def weight_of(by: Arithmetic, weight: float) -> Tracked:
    """Return the weight of an adapter, rounded to float32 as PEFT does."""
    return Tracked(value=np.asarray(weight), error=np.asarray(abs(weight) * UNIT_ROUNDOFF[torch.float32]), by=by)


def added(terms: Sequence[Tracked], weights: Sequence[float]) -> Tracked:
    """Return the weighted sum of terms, whose products are not stored."""
    weighted = (term * weight_of(term.by, weight) for term, weight in zip(terms, weights, strict=True))
    return functools.reduce(operator.add, weighted)


def elected(terms: Sequence[Tracked], weights: Sequence[float]) -> Tracked:
    """Return the weighted mean of those terms that have the sign of the unweighted sum, as TIES defines it.

    Where rounding may decide the sign of the sum, or of a term, each of the terms may be in the mean or not.
    """
    by = terms[0].by
    magnitude = sum(np.abs(term.value) for term in terms)
    error_of_sum = sum(term.error for term in terms) + gamma(len(terms), by.unit) * np.asarray(magnitude)
    is_unsure = np.abs(sum(term.value for term in terms)) <= error_of_sum
    for term in terms:
        is_unsure |= (np.abs(term.value) <= term.error) & (term.error > 0)
    majority = np.where(sum(term.value for term in terms) >= 0, 1.0, -1.0)
    agrees = [np.sign(term.value) == majority for term in terms]
    count = np.maximum(sum(mask.astype(np.float64) for mask in agrees), 1.0)
    agreeing_terms = [where(mask, term) for term, mask in zip(terms, agrees, strict=True)]
    mean = added(agreeing_terms, weights) / by.known(count)
    # the largest mean of any choice of terms
    largest = sum(abs(weight) * (np.abs(term.value) + term.error) for term, weight in zip(terms, weights, strict=True))
    return Tracked(value=mean.value, error=np.where(is_unsure, np.abs(mean.value) + largest, mean.error), by=by)


def where(kept: np.ndarray, term: Tracked) -> Tracked:
    """Return a tensor with the elements that a mask keeps; the others are zeros, without an error."""
    return term.moved(lambda values: np.where(kept, values, 0.0))
