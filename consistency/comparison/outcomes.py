"""Outcomes: how a comparison judged one tensor on workers that are alike in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.words import Word

Status = Literal["equal", "within", "outside", "missing", "unexpected", "skipped", "blocked"]

LEAST_BAD_FIRST: tuple[Status, ...] = ("skipped", "equal", "within", "blocked", "unexpected", "missing", "outside")
"""The last of these stands for several statuses: a worker that skipped a tensor hides no figure of another."""

Workers = tuple[str, ...]
"""Names of workers, in the order of the comparison. Equal ones are one object, so to look one up is quick."""

# fields that a measure and an outcome have in common
_MEASURED = (
    "elements",
    "mismatched",
    "max_abs",
    "mean_abs",
    "max_rel",
    "rms",
    "max_ulp",
    "ratio",
    "allowed",
    "worst_index",
)

NO_DIFFERENCE: dict[str, Any] = {
    "mismatched": 0,
    "max_abs": Real(0.0),
    "mean_abs": Real(0.0),
    "max_rel": Real(0.0),
    "rms": Real(0.0),
    "max_ulp": 0,
}
"""Fields of an outcome whose tensor is bitwise equal to its reference."""


class Graded:
    """A record with a status, and with error/tolerance where there is one."""

    __slots__ = ()
    if TYPE_CHECKING:  # fields of the records
        status: Status
        ratio: Real | None
        max_ulp: int | None

    @property
    def share(self) -> float | None:
        """Return error divided by tolerance; None for a tensor that is equal, or the exact value correctly rounded.

        For the latter the field `ratio` may be 1: one rounding to a half type may use up the whole tolerance, although
        no number of that type is closer to the exact value.
        """
        if self.ratio is None or self.status == "equal" or (self.status == "within" and self.max_ulp == 0):
            return None
        return float(self.ratio)

    @property
    def badness(self) -> tuple[int, float]:
        """Order by status, then by error/tolerance; NaN is worse than any number."""
        ratio = self.share or 0.0
        if math.isnan(ratio):
            ratio = math.inf
        return LEAST_BAD_FIRST.index(self.status), ratio


class Judgement(Graded, msgspec.Struct, frozen=True, kw_only=True, gc=False):  # many of them, and no cycles
    """The judgement of one tensor on one device.

    Attributes
    ----------
    reference : str or None
        What the tensor was compared with: `file`, `float64`, the name of another worker, or None for nothing.
    elements, mismatched : int or None
        None where nothing was measured.
    max_abs, mean_abs, max_rel, rms : float or None
        Figures of the difference from the reference, in the tensor's own unit.
    max_ulp : int or None
        The largest difference in units in the last place of the dtype.
    ratio : float or None
        The worst difference over its tolerance; None for a bitwise rule.
    allowed : float or None
        The tolerance for the element of that difference, in the tensor's own unit.
    evidence : dict
        Data behind the diagnosis; for a difference in bits, both values and both bit patterns.
    reason : str or None
        Why the tensor was skipped or blocked.
    repeated : bool or None
        Whether repeat runs on the same device were bitwise equal; None where there was one run.
    cast, name_in_file : str
        As in `TensorRecord`.
    own_file : bool or None
        The capture was made from other files than the reference's: whether the worker holds the bytes of its own.
    unread : bool
        A stored tensor could not be read.
    """

    reference: str | None
    status: Status
    elements: int | None = None
    mismatched: int | None = None
    max_abs: Real | None = None
    mean_abs: Real | None = None
    max_rel: Real | None = None
    rms: Real | None = None
    max_ulp: int | None = None
    ratio: Real | None = None
    allowed: Real | None = None
    worst_index: tuple[int, ...] | None = None
    word: Word | None = None
    evidence: dict[str, Any] = {}
    reason: str | None = None
    repeated: bool | None = None
    cast: str = ""
    name_in_file: str = ""
    own_file: bool | None = None
    unread: bool = False


class Outcome(Judgement, frozen=True, kw_only=True, gc=False):
    """The judgement of one tensor, and the workers that share it: one or more, in the order of the comparison."""

    workers: Workers

    def with_measure(self, measure: Measure) -> Outcome:
        """Return this outcome with the figures of a measure."""
        return msgspec.structs.replace(self, **{name: getattr(measure, name) for name in _MEASURED})

    def of(self, workers: Workers) -> Outcome:
        """Return this outcome for other workers."""
        return self if workers is self.workers else msgspec.structs.replace(self, workers=workers)


def worst_of(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst of several outcomes, which stands for all; of equally bad ones the first."""
    return max(outcomes, key=lambda outcome: outcome.badness)


K = TypeVar("K")
V = TypeVar("V")


def group_by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, both in the order in which they came."""
    values_by_key: dict[K, list[V]] = {}
    for key, value in pairs:
        values_by_key.setdefault(key, []).append(value)
    return values_by_key


def union_of_workers(sets: Iterable[tuple[str, ...]]) -> dict[str, None]:
    """Return the workers of many sets, each once, in order.

    A set that is met again costs nothing: equal sets are one object, so the identity tells them apart.
    """
    distinct_sets = {id(workers): workers for workers in sets}
    return dict.fromkeys(itertools.chain.from_iterable(distinct_sets.values()))
