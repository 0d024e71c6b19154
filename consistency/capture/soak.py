"""What one worker recorded of its soak: how often it computed the same again, and what changed. No torch here."""

from __future__ import annotations

from typing import Any

import msgspec

from consistency.numerics.measure import Measure
from consistency.numerics.words import Word

MOST_NUMBERS = 20
"""Repeats with a change whose numbers are kept; the others are counted."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a device reported of itself at one moment.

    Attributes
    ----------
    at : str
        UTC, ISO 8601.
    repeat : int
        The repeat that it was read in.
    readings : dict
        By name, units in the names; what the device or its driver does not report is absent.
    """

    at: str
    repeat: int
    readings: dict[str, Any] = {}


class Occurrences(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In which repeats something differed from the first run.

    Attributes
    ----------
    count : int
        Number of repeats.
    numbers : tuple of int
        The first of them, from 1.
    first_at, last_at : str
        UTC, ISO 8601.
    """

    count: int
    numbers: tuple[int, ...]
    first_at: str
    last_at: str


class ChangedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor that differed from its first run.

    Attributes
    ----------
    values : int
        Number of different wrong values: 1 where it was the same bits each time.
    returned : bool
        Whether it was right again after it had been wrong.
    blob, reference_blob : str or None
        The stored tensor of the first repeat that differed, and of one that did not.
    condition : Condition or None
        Of the device in the first repeat that differed.
    """

    stage: str
    layer: str
    tensor: str
    occurrences: Occurrences
    values: int = 1
    returned: bool = False
    shape: tuple[int, ...] = ()
    dtype: str = ""
    measure: Measure | None = None
    word: Word | None = None
    evidence: dict[str, Any] = {}
    blob: str | None = None
    reference_blob: str | None = None
    condition: Condition | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.stage, self.layer, self.tensor)


class SoakedStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stage of a soak.

    Attributes
    ----------
    tensors : int
        Tensors of each repeat that were compared with the first run.
    repeats : int
        Repeats that were completed.
    changed : Occurrences or None
        The repeats in which any tensor differed.
    changed_tensors : int
        Tensors that ever differed; `Soak.changes` may have fewer.
    reason : str or None
        Why it was not repeated.
    """

    stage: str
    tensors: int = 0
    repeats: int = 0
    changed: Occurrences | None = None
    changed_tensors: int = 0
    reason: str | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The matrix products that kept a device busy.

    Attributes
    ----------
    size : str
        Of the matrices, with their dtype.
    products : int
        How many were done.
    products_per_s : float
        How many in a second.
    error : str or None
        Why they ended early.
    """

    size: str
    products: int = 0
    products_per_s: float = 0.0
    error: str | None = None


class Soak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The soak of one worker.

    Attributes
    ----------
    asked_s, elapsed_s : float
    repeats : int
        Complete repeats.
    changed : Occurrences or None
        The repeats in which anything differed from the first run.
    complete : bool
        Whether the time was used up; otherwise the worker was lost during it.
    stages : tuple of SoakedStage
    changes : tuple of ChangedTensor
        The first tensors that differed.
    load : Load or None
        None where none was requested.
    conditions : tuple of Condition
        Of the device when the soak began, at its hottest, and when it ended.
    unread : str or None
        Why there are no readings of the device.
    memory_bytes : tuple of int
        Private memory of the process and allocated memory of its accelerator together: after the second repeat, and
        late in each quarter of the time.
    memory_allowed_bytes : int
        By how much it may grow.
    """

    asked_s: float
    elapsed_s: float = 0.0
    repeats: int = 0
    changed: Occurrences | None = None
    complete: bool = False
    stages: tuple[SoakedStage, ...] = ()
    changes: tuple[ChangedTensor, ...] = ()
    load: Load | None = None
    conditions: tuple[Condition, ...] = ()
    unread: str | None = None
    memory_bytes: tuple[int, ...] = ()
    memory_allowed_bytes: int = 0

    @property
    def begun(self) -> int:
        """Return how many repeats could have shown a change: the last one may have shown it before it was cut."""
        last = 0 if self.changed is None else max((self.changed.count, *self.changed.numbers))
        return max(self.repeats, last)
