"""Compare the tensors of a soak's repeats with the first run, and count what changed: digests alone are kept.

When a tensor differs for the first time its bits are stored, and so are those of the next repeat in which it is right
again; then both are compared element by element.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.capture.soak import MOST_NUMBERS, ChangedTensor, Condition, Occurrences, SoakedStage
from consistency.numerics.diagnosis_moved import diagnose_moved, diagnose_structure
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.distance import measure
from consistency.numerics.dtype import name_of
from consistency.worker.recorder import KEEP_BYTES, Recorder

KEPT_PER_STAGE = 8
"""Most tensors of a stage that are stored: one wrong activation makes all those after it wrong."""

MOST_CHANGES = 200
"""Most tensors that are described; the others are counted. With the evidence of each, their JSON stays below 1 MB."""

_MOST_VALUES = 16
"""Most different values of a tensor that are counted."""

Label = tuple[str, str, str]
"""Stage, layer and tensor."""

Expected = Callable[[], torch.Tensor | None]
"""Returns the right tensor on the CPU, None where there is none."""


class Count:
    """The repeats in which something differed, each counted once."""

    def __init__(self) -> None:
        self.count = 0
        self._last_repeat = 0
        self._numbers: list[int] = []
        self._first_at = self._last_at = ""

    def add(self, repeat: int) -> None:
        """Count a repeat, unless it is the last one counted."""
        self._last_at = now()
        if repeat == self._last_repeat:
            return
        self._last_repeat = repeat
        self.count += 1
        self._first_at = self._first_at or self._last_at
        if len(self._numbers) < MOST_NUMBERS:
            self._numbers.append(repeat)

    def summary(self) -> Occurrences | None:
        """Return the count as it is stored, None of no repeats."""
        if not self.count:
            return None
        return Occurrences(
            count=self.count, numbers=tuple(self._numbers), first_at=self._first_at, last_at=self._last_at
        )


@dataclass(slots=True)
class _Change:
    """A tensor that has differed.

    Attributes
    ----------
    condition : Condition
        The state of the device when it first differed.
    values : set of str
        Digests of its wrong values.
    returned : bool
        It has been right again.
    wrong : torch.Tensor or None
        Its wrong value on the CPU, until it is compared with the right one.
    waits_for : str or None
        Digest of the right value, where that is still to be stored.
    expected : callable or None
        See `Ledger.see`.
    facts : dict
        Fields of the `ChangedTensor` that are known once its values are stored.
    """

    condition: Condition
    count: Count = field(default_factory=Count)
    values: set[str] = field(default_factory=set)
    returned: bool = False
    shape: tuple[int, ...] = ()
    dtype: str = ""
    wrong: torch.Tensor | None = None
    waits_for: str | None = None
    expected: Expected | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """The changes over the repeats of a soak.

    Parameters
    ----------
    first : mapping
        Digests of the first run, by stage, layer and tensor; other tensors are not compared.
    condition : callable
        Returns the state that the device reports of itself, given the number of a repeat.

    Attributes
    ----------
    any : Count
        The repeats in which any tensor differed.
    largest_bytes : int
        Size of the largest tensor that was compared.
    """

    def __init__(self, record: Recorder, first: Mapping[Label, str], *, condition: Callable[[int], Condition]) -> None:
        self._record = record
        self._first = dict(first)
        self._condition = condition
        self._first_repeat: dict[Label, str] = {}
        """Digests of the first repeat, of tensors that are compared with that."""
        self._changes: dict[Label, _Change] = {}
        self._compared: dict[str, set[Label]] = {}
        """Tensors that were compared, by stage."""
        self._by_stage: dict[str, Count] = {}
        """The repeats in which a tensor of a stage differed."""
        self._stored: dict[str, int] = {}
        """Number of tensors that were stored, by stage."""
        self._condition_now: Condition | None = None
        """The state of the device in this repeat, once it was asked for."""
        self.any = Count()
        self.largest_bytes = 0
        self.repeat = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a tensor's right bits are to be stored when it is right again."""
        return any(change.waits_for is not None for change in self._changes.values())

    def knows(self, label: Label) -> bool:
        """Report whether the first run recorded a tensor."""
        return label in self._first

    def has(self, stage: str, tensor: str) -> bool:
        """Report whether the first run recorded a tensor of this name in any layer of a stage."""
        return any(label[0] == stage and label[2] == tensor for label in self._first)

    def learn(self, label: Label, right: str) -> None:
        """Set the digest of a tensor that the first run has not recorded."""
        self._first.setdefault(label, right)

    def begin(self, repeat: int) -> None:
        self.repeat, self._condition_now = repeat, None

    def see(
        self,
        label: Label,
        value: torch.Tensor | TensorDigest,
        *,
        own: bool = False,
        held: torch.Tensor | None = None,
        expected: Expected | None = None,
    ) -> None:
        """Compare one tensor of a repeat.

        Parameters
        ----------
        own : bool
            Compare it with the first repeat instead of the first run, which may have had its operands elsewhere in
            memory: there a CPU's kernels may round differently.
        held : torch.Tensor, optional
            The tensor where `value` is a digest.
        expected : callable, optional
            Gives the right tensor on the CPU, where something other than a repeat does.
        """
        if label not in self._first:
            return
        tensor = value if isinstance(value, torch.Tensor) else held
        actual = digest(value).value if isinstance(value, torch.Tensor) else value.value
        if tensor is not None:
            self.largest_bytes = max(self.largest_bytes, tensor.nbytes)
        right = self._first_repeat.setdefault(label, actual) if own else self._first[label]
        if not own or self.repeat > 1:  # the first repeat is not compared with itself
            self._compared.setdefault(label[0], set()).add(label)
        if actual == right:
            self._note_right(label, actual, tensor)
        else:
            self._note_wrong(label, actual, right, tensor, expected)

    def finish(self) -> None:
        """Take the right bits of a tensor that never was right again from its `expected`, where it has one."""
        for change in self._changes.values():
            if change.waits_for is not None and change.expected is not None:
                right = change.expected()
                if right is not None:
                    self._compare(change, right)
            change.waits_for = change.wrong = None

    def changes(self) -> tuple[ChangedTensor, ...]:
        """Return the tensors that have differed, the first ones first, at most `MOST_CHANGES`."""
        changed = []
        for (stage, layer, tensor), change in list(self._changes.items())[:MOST_CHANGES]:
            occurrences = change.count.summary()
            assert occurrences is not None
            changed.append(
                ChangedTensor(
                    stage=stage,
                    layer=layer,
                    tensor=tensor,
                    occurrences=occurrences,
                    values=len(change.values),
                    returned=change.returned,
                    shape=change.shape,
                    dtype=change.dtype,
                    condition=change.condition,
                    **change.facts,
                )
            )
        return tuple(changed)

    def stage(self, stage: str, repeats: int) -> SoakedStage:
        """Return the summary of a stage that was repeated so often."""
        count = self._by_stage.get(stage)
        return SoakedStage(
            stage=stage,
            tensors=len(self._compared.get(stage, ())),
            repeats=repeats,
            changed=None if count is None else count.summary(),
            changed_tensors=sum(label[0] == stage for label in self._changes),
        )

    def _note_right(self, label: Label, actual: str, tensor: torch.Tensor | None) -> None:
        """Note a tensor that is right; if it was wrong before, compare the right bits with the wrong ones."""
        change = self._changes.get(label)
        if change is None:
            return
        change.returned = True
        if change.waits_for == actual and tensor is not None:
            self._compare(change, tensor.detach().to("cpu"))
            change.waits_for = change.wrong = None

    def _note_wrong(
        self, label: Label, actual: str, right: str, tensor: torch.Tensor | None, expected: Expected | None
    ) -> None:
        """Count a tensor that differs, and store its bits if it is among the first of its stage.

        Parameters
        ----------
        actual, right : str
            Digests of the tensor, and of its right value.
        """
        stage = label[0]
        self._condition_now = self._condition_now or self._condition(self.repeat)
        change = self._changes.setdefault(label, _Change(self._condition_now))
        change.count.add(self.repeat)
        self._by_stage.setdefault(stage, Count()).add(self.repeat)
        self.any.add(self.repeat)
        if len(change.values) < _MOST_VALUES:
            change.values.add(actual)
        if tensor is None or "blob" in change.facts:
            return
        change.shape, change.dtype = tuple(tensor.shape), name_of(tensor.dtype)
        if self._stored.get(stage, 0) < KEPT_PER_STAGE and tensor.nbytes <= KEEP_BYTES:
            self._stored[stage] = self._stored.get(stage, 0) + 1
            change.wrong = tensor.detach().to("cpu", copy=True)
            change.facts["blob"] = self._record.keep(change.wrong)
            change.waits_for, change.expected = right, expected

    def _compare(self, change: _Change, right: torch.Tensor) -> None:
        """Store the right bits, and describe how the wrong ones differ."""
        wrong = change.wrong
        assert wrong is not None
        change.facts["reference_blob"] = self._record.keep(right)
        diagnosis = diagnose_structure(wrong, right)
        if diagnosis is None:
            difference = measure(wrong, right)
            diagnosis = diagnose_moved(wrong, right, difference)
            change.facts |= {"measure": difference, "evidence": {**diagnosis.evidence, **difference.evidence()}}
        change.facts["word"] = diagnosis.word


def now() -> str:
    """Return the time, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


Again = Callable[[], Iterator[None]]
"""Repeats a stage once; it may be ended at each `yield`."""
