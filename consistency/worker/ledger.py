"""Compare what is computed again with the first run, and count what changed: digests alone are kept.

Of a tensor that differs for the first time the bits are stored, and those of the next repeat in which it is right
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
"""Tensors of a stage that are stored: one wrong activation makes all those after it wrong."""

MOST_CHANGES = 200
"""Tensors that are described; the others are counted. With the evidence of each, their JSON stays below 1 MB."""

_MOST_VALUES = 16

Label = tuple[str, str, str]
Expected = Callable[[], torch.Tensor | None]


class Count:
    """The repeats in which something differed, each counted once."""

    def __init__(self) -> None:
        self.count = 0
        self._last = 0
        self._numbers: list[int] = []
        self._first_at = self._last_at = ""

    def add(self, repeat: int) -> None:
        self._last_at = now()
        if repeat == self._last:
            return
        self._last = repeat
        self.count += 1
        self._first_at = self._first_at or self._last_at
        if len(self._numbers) < MOST_NUMBERS:
            self._numbers.append(repeat)

    def summary(self) -> Occurrences | None:
        if not self.count:
            return None
        return Occurrences(
            count=self.count, numbers=tuple(self._numbers), first_at=self._first_at, last_at=self._last_at
        )


@dataclass(slots=True)
class _Change:
    """A tensor that has differed; `waits_for` is the digest of the right one that is to be stored."""

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
    """What changed over the repeats of a soak.

    Parameters
    ----------
    first : mapping
        Digests of the first run, by stage, layer and tensor; what is not among them is not compared.
    condition : callable
        Given the number of a repeat, what the device reports of itself.
    """

    def __init__(self, record: Recorder, first: Mapping[Label, str], *, condition: Callable[[int], Condition]) -> None:
        self._record = record
        self._first = dict(first)
        self._condition = condition
        self._own: dict[Label, str] = {}
        self._changes: dict[Label, _Change] = {}
        self._tensors: dict[str, set[Label]] = {}
        self._by_stage: dict[str, Count] = {}
        self._kept: dict[str, int] = {}
        self._now: Condition | None = None
        self.any = Count()
        self.largest_bytes = 0
        self.repeat = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the right bits of a tensor are to be stored when it is right again."""
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
        self.repeat, self._now = repeat, None

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
        self.largest_bytes = max(self.largest_bytes, 0 if tensor is None else tensor.nbytes)
        here = (digest(value) if isinstance(value, torch.Tensor) else value).value
        right = self._own.setdefault(label, here) if own else self._first[label]
        if not own or self.repeat > 1:
            self._tensors.setdefault(label[0], set()).add(label)
        if here == right:
            self._is_right(label, here, tensor)
        else:
            self._is_wrong(label, here, right, tensor, expected)

    def finish(self) -> None:
        """Take the right bits from elsewhere, where a tensor never was right again."""
        for change in self._changes.values():
            if change.waits_for is not None and change.expected is not None:
                right = change.expected()
                if right is not None:
                    self._compare(change, right)
            change.waits_for = change.wrong = None

    def changes(self) -> tuple[ChangedTensor, ...]:
        found = []
        for (stage, layer, tensor), change in list(self._changes.items())[:MOST_CHANGES]:
            occurrences = change.count.summary()
            assert occurrences is not None
            found.append(
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
        return tuple(found)

    def stage(self, stage: str, repeats: int) -> SoakedStage:
        changed = self._by_stage.get(stage)
        return SoakedStage(
            stage=stage,
            tensors=len(self._tensors.get(stage, ())),
            repeats=repeats,
            changed=None if changed is None else changed.summary(),
            changed_tensors=sum(label[0] == stage for label in self._changes),
        )

    def _is_right(self, label: Label, here: str, tensor: torch.Tensor | None) -> None:
        change = self._changes.get(label)
        if change is None:
            return
        change.returned = True
        if change.waits_for == here and tensor is not None:
            self._compare(change, tensor.detach().to("cpu"))
            change.waits_for = change.wrong = None

    def _is_wrong(
        self, label: Label, here: str, right: str, tensor: torch.Tensor | None, expected: Expected | None
    ) -> None:
        stage = label[0]
        self._now = self._now or self._condition(self.repeat)
        change = self._changes.setdefault(label, _Change(self._now))
        change.count.add(self.repeat)
        self._by_stage.setdefault(stage, Count()).add(self.repeat)
        self.any.add(self.repeat)
        if len(change.values) < _MOST_VALUES:
            change.values.add(here)
        if tensor is None or "blob" in change.facts:
            return
        change.shape, change.dtype = tuple(tensor.shape), name_of(tensor.dtype)
        if self._kept.get(stage, 0) < KEPT_PER_STAGE and tensor.nbytes <= KEEP_BYTES:
            self._kept[stage] = self._kept.get(stage, 0) + 1
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
            found = measure(wrong, right)
            diagnosis = diagnose_moved(wrong, right, found)
            change.facts |= {"measure": found, "evidence": {**diagnosis.evidence, **found.evidence()}}
        change.facts["word"] = diagnosis.word


def now() -> str:
    """Return the time, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


Again = Callable[[], Iterator[None]]
"""Repeats a stage once; it may be ended at each `yield`."""
