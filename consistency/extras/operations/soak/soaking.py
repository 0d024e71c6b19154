"""Repeat the stages of a case until the time is up.

Only digests are kept, so memory stays flat; it is measured all the same. When the time is up a repeat is ended between
two tensors; but the first one is completed, and so is one more where the right bits of a changed tensor are missing.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from consistency.capture.soak import MOST_NUMBERS, Condition, Soak, SoakedStage
from consistency.case.duration import duration_text
from consistency.case.stage import Stage, StageSpec
from consistency.devices.host.condition import read_cpu, read_gpu
from consistency.extras.operations.soak.load import Busy, busy
from consistency.worker import determinism
from consistency.worker.context import AfterStages, Machine
from consistency.worker.ledger import Again, Ledger, now
from consistency.worker.memory.host_memory import private_bytes
from consistency.worker.memory.mapped_pages import trim
from consistency.worker.memory.placement import Allocator
from consistency.worker.recorder import KEEP_BYTES

_TELL_S = 1.0
_NOTE_S = 5.0
"""Seconds between two messages to the parent, and between two notes of state and condition: the last note of a worker
that dies is no older."""

_QUARTERS = 4

_ALLOWED_TENSORS = 2
"""Tensors by which memory may grow besides `KEEP_BYTES`, the largest one that is stored: one that is held, and the next
one that is being made. Over the 1277 repeats of ten minutes, memory of a built-in case grew by 36 KiB."""

Update = Callable[[Soak], None]


def soak(after: AfterStages) -> None:
    """Compute the same again until the time is up."""
    Soaking(after.context, after.specs, lambda soak: after.update(soak=soak), uuid=after.device_uuid).run()


class Soaking:
    """One worker's soak.

    Parameters
    ----------
    context : Machine
        A `Context` where a model is loaded.
    specs : sequence of StageSpec
        The stages of the case, in the order in which they ran.
    """

    def __init__(
        self,
        context: Machine,
        specs: Sequence[StageSpec],
        update: Update,
        *,
        uuid: str | None = None,
    ) -> None:
        asked_s = context.job.case.soak_s
        assert asked_s is not None
        self._context = context
        self._update = update
        self._uuid = uuid
        self._asked_s = asked_s
        self._began_s = time.monotonic()
        self._told_s = self._noted_s = 0.0
        self._repeats = 0  # completed repeats
        self._changes = 0  # changed tensors at the last note
        self._memory: list[int] = []  # bytes after the second repeat, and of each quarter
        self._conditions: dict[str, Condition] = {}
        self._unread: str | None = None  # why the device's condition cannot be read
        self._load: Busy | None = None
        self._ledger = Ledger(context.record, context.record.digests, condition=self._read)
        self._counts: dict[Stage, int] = {}
        self._skipped: list[SoakedStage] = []
        self._stages: dict[Stage, Again] = {}
        recorded = {stage for stage, _, _ in context.record.digests}
        for spec in specs:
            reason = _why_not(spec, recorded)
            if reason:
                self._skipped.append(SoakedStage(stage=spec.stage, reason=reason))
            else:
                factory = pkgutil.resolve_name(spec.again)
                self._stages[spec.stage] = factory(context, self._ledger)
                self._counts[spec.stage] = 0

    def run(self) -> None:
        """Repeat until the time is up."""
        keeping_busy = busy(self._context.device) if self._context.job.case.load else nullcontext()
        with keeping_busy as self._load:
            self._began_s = time.monotonic()
            self._conditions["first"] = self._read(0)
            while self._stages and not self._is_over():
                self._repeat()
            if self._ledger.is_waiting:
                self._repeat(to_the_end=True)
            self._ledger.finish()
            self._conditions["last"] = self._read(self._repeats)
            self._note(complete=True)

    def _repeat(self, *, to_the_end: bool = False) -> None:
        """Compute all stages once more; unless `to_the_end`, stop between two tensors when the time is up."""
        self._ledger.begin(self._repeats + 1)
        to_the_end = to_the_end or self._repeats == 0
        for stage, again in self._stages.items():
            determinism.seed_all()  # as at the beginning of the stage
            steps = again()
            for _ in steps:
                self._tell()
                if self._is_over() and not to_the_end:
                    return
            self._counts[stage] += 1
            self._tell()
        self._repeats += 1
        self._measure()

    def _is_over(self) -> bool:
        """Return whether the time is up, and one repeat was completed."""
        return time.monotonic() - self._began_s >= self._asked_s and self._repeats > 0

    def _tell(self) -> None:
        """Give a sign of life, and note the state, each once in a while."""
        now_s = time.monotonic()
        elapsed_s, changed = now_s - self._began_s, self._ledger.any.count
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            remaining = duration_text(max(1.0, round(self._asked_s - elapsed_s)))
            text = f"repeat {self._repeats + 1}, {remaining} left"
            if changed:
                text += f", {changed} differ"
            self._context.events.step(text, min(int(elapsed_s), int(self._asked_s)), max(1, int(self._asked_s)))
        # a new change is noted at once, as far as changes are kept one by one
        is_new = self._changes != changed <= MOST_NUMBERS
        if is_new or now_s - self._noted_s >= _NOTE_S:
            self._changes, self._noted_s = changed, now_s
            self._read(self._repeats + 1)
            self._note()

    def _note(self, *, complete: bool = False) -> None:
        """Write the state of the soak to the capture."""
        repeated = [self._ledger.stage(stage, count) for stage, count in self._counts.items()]
        self._update(
            Soak(
                asked_s=self._asked_s,
                elapsed_s=round(time.monotonic() - self._began_s, 3),
                repeats=self._repeats,
                changed=self._ledger.any.summary(),
                complete=complete,
                stages=(*repeated, *self._skipped),
                changes=self._ledger.changes(),
                load=None if self._load is None else self._load.summary(),
                conditions=tuple(self._conditions.values()),
                unread=self._unread,
                memory_bytes=tuple(self._memory),
                memory_allowed_bytes=_ALLOWED_TENSORS * self._ledger.largest_bytes + KEEP_BYTES,
            )
        )

    def _read(self, repeat: int) -> Condition:
        """Read what the device reports of itself, and keep its hottest moment."""
        is_cpu = self._context.device.type == "cpu"
        readings, self._unread = read_cpu() if is_cpu else read_gpu(self._uuid)
        condition = Condition(at=now(), repeat=repeat, readings=readings)
        hottest = self._conditions.get("hottest")
        temperature_c = readings.get("temperature_c")
        if temperature_c is not None and (hottest is None or temperature_c > hottest.readings["temperature_c"]):
            self._conditions["hottest"] = condition
        return condition

    def _measure(self) -> None:
        """Measure the process's memory after the second repeat, once in each quarter of the time, and after the last.

        In the first repeat libraries fill their caches, and the digests are collected. What the C library keeps for
        reuse is given back first: it grows with the order in which threads take and free memory, by a tenth in an hour
        under load.
        """
        if self._repeats < 2:
            return
        trim()
        private = private_bytes()
        if private is None:
            return
        quarter = 1 + min(_QUARTERS - 1, int(_QUARTERS * (time.monotonic() - self._began_s) / self._asked_s))
        if len(self._memory) > quarter:
            self._memory.pop()  # the latest one stands for its quarter
        self._memory.append(private + _allocated(self._context.device))


def _allocated(device: torch.device) -> int:
    """Return the bytes that torch has allocated on an accelerator; 0 for a CPU."""
    return 0 if device.type == "cpu" else Allocator(device.type).figures(device).allocated or 0


def _why_not(spec: StageSpec, recorded: set[str]) -> str:
    """Return why a stage is not repeated; empty where it is."""
    if not spec.again:
        return "it states facts, which are checked once"
    return "" if spec.stage in recorded else "the first run compared nothing of it"
