"""Weighted sums and means of several adapters' tensors, element by element, with what rounding may make of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from consistency.numerics.bound import gamma
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.running_error import Arithmetic, Tracked


def weight_of(by: Arithmetic, weight: float) -> Tracked:
    """Return the weight of an adapter, rounded to float32 as PEFT does."""
    return Tracked(value=np.asarray(weight), error=np.asarray(abs(weight) * UNIT_ROUNDOFF[torch.float32]), by=by)


def added(terms: Sequence[Tracked], weights: Sequence[float]) -> Tracked:
    """Return the weighted sum."""
    total, *others = [term * weight_of(term.by, weight) for term, weight in zip(terms, weights, strict=True)]
    for other in others:
        total = total + other
    return total


def elected(terms: Sequence[Tracked], weights: Sequence[float]) -> Tracked:
    """Return the weighted mean of those terms that have the sign of the unweighted sum, as TIES defines it.

    Where rounding may decide the sign of the sum, or of a term, each of the terms may be in the mean or not.
    """
    by = terms[0].by
    size = sum(np.abs(term.value) for term in terms)
    unsure = np.abs(sum(term.value for term in terms)) <= sum(term.error for term in terms) + gamma(
        len(terms), by.unit
    ) * np.asarray(size)
    for term in terms:
        unsure |= (np.abs(term.value) <= term.error) & (term.error > 0)
    majority = np.where(sum(term.value for term in terms) >= 0, 1.0, -1.0)
    agree = [np.sign(term.value) == majority for term in terms]
    mean_of = np.maximum(sum(one.astype(np.float64) for one in agree), 1.0)
    mean = added([where(one, term) for term, one in zip(terms, agree, strict=True)], weights) / by.known(mean_of)
    most = sum(abs(weight) * (np.abs(term.value) + term.error) for term, weight in zip(terms, weights, strict=True))
    return Tracked(value=mean.value, error=np.where(unsure, np.abs(mean.value) + most, mean.error), by=by)


def where(kept: np.ndarray, term: Tracked) -> Tracked:
    """Return what is kept of a tensor; the rest are zeros, without an error."""
    return term.moved(lambda values: np.where(kept, values, 0.0))
