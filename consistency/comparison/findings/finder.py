"""The declaration of a finder: its name, its place among the others, and its function.

A module of this folder declares its finders in `FINDERS`, and is found. A plug-in names those of its own in
`Plugin.finders`. Findings of one severity stand in a report in the order of their finders.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.result import Finding, TensorComparison


class Phase(enum.IntEnum):
    """The subjects of finders, in the order of a report."""

    COMPLETENESS = enum.auto()
    """Captures, workers and stages that are not whole, and values that cannot be compared."""
    CONDITIONS = enum.auto()
    """Conditions that workers need to have in common, so that their numbers can be compared."""
    DEVICES = enum.auto()
    """Results of devices by themselves: digests, repeats, copies to each other."""
    CAUSES = enum.auto()
    """Causes of the tensors that are wrong."""
    STAGES = enum.auto()
    """Other facts that the rows of single stages and load paths show."""
    AGREEMENT = enum.auto()
    """Bits that should be equal: from repeat to repeat, and from device to device of one model."""
    HOSTS = enum.auto()
    """Problems of machines, and settings that are not in force."""
    MODEL = enum.auto()
    """Facts of the base and the adapter that hold whatever the devices do."""
    REMARKS = enum.auto()
    """Limits of the whole comparison: tolerances of the user, planted faults, skipped checks."""
    REMAINDER = enum.auto()
    """Mismatches that no finding of an earlier phase explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """One finder of a comparison.

    Attributes
    ----------
    name : str
        The subject of its findings, in a word or two.
    phase : Phase
        When it is called. It may read the findings of earlier phases.
    position : int or None
        Its place within the phase, from 1; one without follows all that have one. Two may have the same: one of a
        plug-in follows one of this package then.
    find : callable
        Given the evidence, the findings.
    without_own : callable or None
        Given the evidence and tensors, the tensors without the rows that this finder reports alone, so that they are
        not reported as an unknown cause too.
    """

    name: str
    phase: Phase
    position: int | None = None
    find: Callable[[ComparisonEvidence], Iterable[Finding]]
    without_own: Callable[[ComparisonEvidence, Sequence[TensorComparison]], Sequence[TensorComparison]] | None = None

    @property
    def place(self) -> tuple[Phase, float]:
        """Return the key that finders are sorted by."""
        position = math.inf if self.position is None else self.position
        return self.phase, position
