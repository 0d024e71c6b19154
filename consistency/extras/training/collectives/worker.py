"""Stage `collectives`: the ranks of a group send each other numbers and add them up, and each judges its own answer.

The group is the workers of one kind that run side by side (`group.py`); after all of them, groups of two and of three
neighbours do the same at fewer sizes. NumPy draws what each rank gives, so each rank
knows what it has to get: what is moved, bit by bit; a sum, within the bound of any order. What all ranks get has to be
the same bits, which they tell each other beside the collectives. Equal devices of another host may get other bits of a
sum of three or more: a library need not add up the ranks in the same order there. Rank 0 decides nothing for others: a
script that prints what rank 0 got says "correct" where all others are wrong.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from consistency.capture.names import SUM_OVER_RANKS
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.capture.wording import some
from consistency.errors import first_line
from consistency.extras.training.collectives.operations import (
    EVERY_COLLECTIVE,
    SIZES,
    SIZES_OF_SOME,
    STRIDED,
    Collective,
    Contribution,
    groups_of,
    overlooks_gaps,
)
from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.extras.training.group_stage import run_in_group
from consistency.extras.training.ranks.group import GroupError, JoinedGroup
from consistency.numerics import words
from consistency.numerics.diagnosis_moved import Known, diagnose_moved
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.rules import Rule, passes
from consistency.numerics.running_error import Sum, measure_tracked
from consistency.worker.context import Machine
from consistency.worker.judging.bound_rule import record_bounded
from consistency.worker.memory.mapped_pages import trim

STAGE = COLLECTIVES
SAME_BITS = "same bits on all ranks"
REPEATED = "same bits twice"

_UNSUPPORTED = (
    "cannot use",
    "not supported",
    "does not support",
    "unsupported",
    "not implemented",
    "invalid data type",
    "must be contiguous",
    "non-overlapping and dense",
)
"""Words in an error that a backend raises on every rank before it sends anything."""

_COPY = "call .contiguous() first, and copy the result back"


def run(context: Machine) -> None:
    """Run every collective of the level with the other ranks, and record what this one got."""
    level = context.job.case.level

    def try_all(ranks: JoinedGroup) -> None:
        _Trials(context, ranks).run(SIZES[level])
        for members in groups_of(ranks.world):
            ranks.exchange(f"groups of {len(members)} from {members[0]}", "")  # all, or some wait in a collective
            some = ranks.subgroup(members)
            if some is not None:
                _Trials(context, some).run(SIZES_OF_SOME[level])

    run_in_group(context, STAGE, try_all)


_LARGE = 1 << 22
"""Elements of a collective whose freed buffers go back to the system: those of the next one have other sizes. Below,
16 MiB in float32, it would take longer than it saves memory."""


class _Trials:
    """The collectives of one rank among some ranks: all of the group, or a part of it."""

    def __init__(self, context: Machine, ranks: JoinedGroup) -> None:
        self._context = context
        self._ranks = ranks
        self._evidence = facts(ranks)
        self._of_some = ranks.members is not None
        self._who = "+".join(ranks.names) if self._of_some else f"{ranks.world} ranks"

    def run(self, sizes: Sequence[int]) -> None:
        for number, collective in enumerate(EVERY_COLLECTIVE):
            if not self._context.record.wants(STAGE, collective.name):
                continue
            if collective.name == STRIDED and self._overlooks_gaps():
                reason = f"{self._evidence['backend']} adds up a tensor with gaps as if it had none: {_COPY}"
                self._absent(collective, "", reason)
                continue
            for dtype in collective.dtypes:
                for size in dict.fromkeys(collective.size(size, dtype, self._ranks.world) for size in sizes):
                    step = f"{collective.name} {dtype} {size} of {self._who}"
                    self._context.events.step(step, number, len(EVERY_COLLECTIVE))
                    has_it = self._try(collective, dtype, size)
                    if size >= _LARGE:
                        trim()
                    if not has_it:
                        break

    def _try(self, collective: Collective, dtype: str, size: int) -> bool:
        """Run a collective twice, and record its result; return whether the backend has it."""
        ranks, record = self._ranks, self._context.record
        given = collective.given(dtype, size, ranks.world)
        name = f"{dtype} {size} of {self._who}"
        own = given[ranks.rank].whole()
        try:
            first = self._result(collective, own, name)
            second = self._result(collective, own, name)
        except (GroupError, ValueError) as error:
            cause = error.__cause__ or error
            if not any(text in str(cause).lower() for text in _UNSUPPORTED):
                raise
            reason = f"{self._evidence['backend']} has no {collective.name} of {dtype}: {first_line(cause)}"
            self._absent(collective, dtype, reason)
            return False
        digests = [digest(first), digest(second)]
        again = second if digests[0].value != digests[1].value else None
        del own, second  # as large as what is expected, which is made now
        expected = collective.expected(given, ranks.rank)
        if not collective.is_same or self._of_some:
            self._judge_own(collective, name, first, expected)
        elif isinstance(expected, Sum):
            # by itself: what another collective adds up does not reach this one
            with record.operations.apart():
                if ranks.world > 2:
                    record.operations.note(SUM_OVER_RANKS)
                record_bounded(record, STAGE, collective.name, name, actual=first, exact=expected, digests=digests[:1])
        else:
            row = TensorRecord(STAGE, collective.name, name, rule=Rule.BITWISE, status="equal", evidence=self._evidence)
            record.moved(row, actual=first, expected=expected, known=self._known(given))
        if again is not None:
            self._judge_repeat(collective, name, again, expected)
        self._compare(collective, name, digests[0].value)
        return True

    def _absent(self, collective: Collective, tensor: str, reason: str) -> None:
        record, tensor = self._context.record, f"{tensor or 'any dtype'} of {self._who}"
        if self._of_some:  # a fact: of the ranks that are in other groups it is not expected
            record.fact(STAGE, collective.name, tensor, status="skipped", reason=reason)
        else:
            record.skipped(STAGE, reason, tensor, layer=collective.name)

    def _overlooks_gaps(self) -> bool:
        """Return whether the sum of any rank does: what one skips, all have to skip."""
        with self._ranks.in_collective("a sum of a tensor with gaps"):
            try:
                found = overlooks_gaps(self._ranks)
            except ValueError:  # it refuses such a tensor, which is recorded of the collective itself
                found = False
        return str(True) in self._ranks.exchange("gaps", str(found))

    def _judge_own(self, collective: Collective, name: str, actual: torch.Tensor, expected: torch.Tensor | Sum) -> None:
        """Record what no other rank has to get: without a digest, which would be compared with theirs."""
        word, share = None, None
        evidence: dict[str, Any] = dict(self._evidence)
        if isinstance(expected, Sum):
            found = measure_tracked(actual, expected)
            share = float(found.ratio or 0)
            status: RecordStatus = "within" if passes(share) else "outside"
            word = words.DIFFERS if status == "outside" else None
        else:
            found = measure(actual, expected)
            status = "equal" if found.mismatched == 0 else "outside"
            if status == "outside":
                word = diagnose_moved(actual, expected, found).word
        if status == "outside":
            evidence["wrong_elements"] = found.mismatched
            evidence["worst_index"] = list(found.worst_index or ())
        self._context.record.fact(
            STAGE, collective.name, name, status=status, word=word, share=share, evidence=evidence
        )

    def _known(self, given: Sequence[Contribution]) -> Known:
        """Return what else a rank could hold: what another one gave."""
        given_by = [(f"what {name} gave", one) for name, one in zip(self._ranks.names, given, strict=True)]
        return Known(
            swapped=lambda tensor: next((name for name, one in given_by if torch.equal(tensor, one.whole())), None)
        )

    def _result(self, collective: Collective, own: torch.Tensor, name: str) -> torch.Tensor:
        ranks = self._ranks
        with ranks.in_collective(f"{collective.name} {name}"):
            return collective.run(own.to(ranks.device, copy=True), ranks).to("cpu")

    def _judge_repeat(
        self, collective: Collective, name: str, actual: torch.Tensor, expected: torch.Tensor | Sum
    ) -> None:
        """Record other bits in the second run: a sum may have another order then, and nothing else may change."""
        right = isinstance(expected, Sum) and passes(float(measure_tracked(actual, expected).ratio or 0))
        self._context.record.fact(
            STAGE,
            collective.name,
            f"{name}, {REPEATED}",
            status="within" if right else "outside",
            word=None if right else words.DIFFERS,
            evidence=self._evidence,
            reason="a second run of the same sum gave other bits, within tolerance: its order is not fixed"
            if right
            else "a second run of the same gave other bits, which are wrong",
        )

    def _compare(self, collective: Collective, name: str, value: str) -> None:
        """Record whether this rank has the bits of the others; each waits here for all to have judged theirs."""
        ranks, record = self._ranks, self._context.record
        answers = ranks.exchange(f"{collective.name} {name}", value)
        if not collective.is_same:
            return
        others = ranks.ranks_against(answers)
        record.fact(
            STAGE,
            collective.name,
            f"{name}, {SAME_BITS}",
            status="outside" if others else "equal",
            word=words.DIFFERS if others else None,
            evidence=self._evidence,
            reason=f"other bits than on {some(others)}" if others else None,
        )


_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "HCCL_", "CCL_")

_PRIVATE = frozenset({
    "ADDR", "COMM", "DIR", "FILE", "HOST", "HOSTID", "ID", "IP", "KEY", "PASSWORD", "PATH", "SECRET", "SERVER", "TOKEN",
    "WHITELIST",
})  # fmt: skip
"""Parts of the names of variables whose values may be a host, a place in its files, or a secret."""

_CHOICES = {"algorithm": "NCCL_ALGO", "protocol": "NCCL_PROTO"}


def variables() -> dict[str, str]:
    """Return the variables of this process that tell a library of collectives what to do."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and _PRIVATE.isdisjoint(name.split("_"))
    }


def facts(ranks: JoinedGroup) -> dict[str, Any]:
    """Return who talks, by which backend, and what is known of its choices: NCCL tells no caller what it chose."""
    backend = str(dist.get_backend(ranks.process_group))
    found: dict[str, Any] = {"ranks": list(ranks.names), "backend": backend}
    if backend == "nccl":
        found["version"] = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {what: os.environ.get(name) or "chosen by NCCL" for what, name in _CHOICES.items()}
    if told := variables():
        found["variables"] = told
    return found
