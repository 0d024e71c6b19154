"""What `magnitude_prune` and `ties` make of factors: definitions in float64, with every choice that a device may make.

Both keep the largest elements of each factor by magnitude. The magnitudes are stored numbers, so which are largest is
known exactly but where several are equal to the smallest that is kept: any of these may be. `ties` then elects a sign
for each element by the sum of what was kept, and takes the mean of those that have it. The rounded sum of two numbers
has the sign of their sum; of more, either sign may win where the sum is within its rounding. An element is judged by
the choice that it is nearest to.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from consistency.numerics.bound import gamma
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.running_error import Arithmetic, Tracked

PRUNED = ("magnitude_prune", "ties")

DENSITY = 0.7
"""Share of the elements that are kept: not a half, which could not be told from the share of those left out."""

MOST_TIED = 4
"""Factors with equal magnitudes at the limit: twice as many choices with each."""


def pruned(
    kind: str, by: Arithmetic, tensors: Sequence[np.ndarray], weights: Sequence[float], actual: np.ndarray
) -> Tracked | None:
    """Return the exact combination of factors of one shape; None where too many of them have equal magnitudes.

    Parameters
    ----------
    kind : str
        One of `PRUNED`.
    tensors : sequence of np.ndarray
        Float64, as stored in the dtype of the factors.
    weights : sequence of float
        The root of each adapter's weight times its scaling, with its sign where the factor carries it.
    actual : np.ndarray
        What the device computed, float64.
    """
    largest = [_largest(tensor) for tensor in tensors]
    tied = [number for number, (_, equal) in enumerate(largest) if equal.any()]
    if len(tied) > MOST_TIED:
        return None
    best: Tracked | None = None
    for choice in itertools.product((False, True), repeat=len(tied)):
        taken = dict(zip(tied, choice, strict=True))
        kept = [
            np.where(sure | (equal & taken.get(number, False)), tensor, 0.0)
            for number, (tensor, (sure, equal)) in enumerate(zip(tensors, largest, strict=True))
        ]
        for one in _elected(by, kept, weights) if kind == "ties" else [sum_of(by, kept, weights)]:
            best = one if best is None else _nearer(best, one, actual)
    return best


def _largest(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which elements are kept, and which of equal magnitude may be: a zero is the same either way."""
    size, count = np.abs(tensor), int(DENSITY * tensor.size)
    if not count:
        return np.zeros(tensor.shape, bool), np.zeros(tensor.shape, bool)
    limit = np.partition(size.ravel(), tensor.size - count)[tensor.size - count]
    sure, equal = size > limit, size == limit
    if np.count_nonzero(sure) + np.count_nonzero(equal) == count:
        return sure | equal, np.zeros(tensor.shape, bool)
    return sure, equal & (size > 0)


def sum_of(by: Arithmetic, tensors: Sequence[np.ndarray], weights: Sequence[float]) -> Tracked:
    """Return the weighted sum of tensors, each product stored."""
    terms = [(by.known(one) * weight_of(by, weight)).store() for one, weight in zip(tensors, weights, strict=True)]
    return functools.reduce(operator.add, terms).store()


def _elected(by: Arithmetic, kept: Sequence[np.ndarray], weights: Sequence[float]) -> Iterator[Tracked]:
    total, size = sum(kept), sum(map(np.abs, kept))
    majority = np.where(total >= 0, 1.0, -1.0)
    unsure = np.abs(total) <= gamma(len(kept), by.unit) * size if len(kept) > 2 else np.zeros(majority.shape, bool)
    for sign in (majority, np.where(unsure, -majority, majority)) if unsure.any() else (majority,):
        agree = [np.sign(tensor) == sign for tensor in kept]
        mean_of = np.maximum(sum(one.astype(np.float64) for one in agree), 1.0)
        those = [np.where(one, tensor, 0.0) for one, tensor in zip(agree, kept, strict=True)]
        yield (sum_of(by, those, weights) / by.known(mean_of)).store()


def _nearer(a: Tracked, b: Tracked, actual: np.ndarray) -> Tracked:
    second = np.abs(actual - b.value) - b.allowed < np.abs(actual - a.value) - a.allowed
    return Tracked(value=np.where(second, b.value, a.value), error=np.where(second, b.error, a.error), by=a.by)


def weight_of(by: Arithmetic, weight: float) -> Tracked:
    """Return the weight of an adapter, rounded to float32 as PEFT does."""
    return Tracked(value=np.asarray(weight), error=np.asarray(abs(weight) * UNIT_ROUNDOFF[torch.float32]), by=by)


def added(terms: Sequence[Tracked], weights: Sequence[float]) -> Tracked:
    """Return the weighted sum."""
    return functools.reduce(operator.add, (t * weight_of(t.by, one) for t, one in zip(terms, weights, strict=True)))


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
