"""Stage `collectives`: the ranks of a group send each other numbers and add them up, and each judges its own answer.

The group is the workers of one kind that run side by side (`group.py`). NumPy draws what each rank gives, so each rank
knows what it has to get: what is moved, bit by bit; a sum, within the bound of any order. What all ranks get has to be
the same bits, which they tell each other beside the collectives. Rank 0 decides nothing for others: a script that
prints what rank 0 got says "correct" where all others are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import RecordStatus
from consistency.capture.wording import some
from consistency.case.stages import SPECS, Stage
from consistency.numerics.diagnosis_moved import Known, diagnose_moved
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.rules import passes
from consistency.numerics.running_error import measure_tracked
from consistency.numerics.sums import Sum
from consistency.numerics.words import Word
from consistency.worker.ranks.group import GroupError, Joined, joined
from consistency.worker.stages.bound_rule import record_bounded
from consistency.worker.stages.collectives.operations import COLLECTIVES, IN_PARTS, SIZES, Collective, given
from consistency.worker.stages.context import Machine

STAGE = Stage.COLLECTIVES
SAME_BITS = "same bits on all ranks"
REPEATED = "same bits twice"

_UNSUPPORTED = (
    "cannot use",
    "not supported",
    "does not support",
    "unsupported",
    "not implemented",
    "invalid data type",
)


def run(context: Machine) -> None:
    """Run every collective of the level with the other ranks, and record what this one got."""
    group = context.job.group
    if group is None:
        _skip(context, "no other worker runs beside this one on a device of its type")
        return
    try:
        with joined(group, context.device, context.events, STAGE) as ranks:
            _Trials(context, ranks).run()
    except GroupError as error:
        if not error.lost:
            raise
        _skip(context, str(error))  # that a rank is lost is a finding of its own


def _skip(context: Machine, reason: str) -> None:
    spec = SPECS[STAGE]
    context.record.absent(STAGE, WHOLE_MODEL, spec.whole, status="skipped", reason=reason, rule=spec.rule)


class _Trials:
    """The collectives of one rank."""

    def __init__(self, context: Machine, ranks: Joined) -> None:
        self._context = context
        self._ranks = ranks
        self._evidence = {"ranks": list(ranks.group.ranks), "backend": str(dist.get_backend())}

    def run(self) -> None:
        sizes = SIZES[self._context.job.case.level]
        for number, collective in enumerate(COLLECTIVES):
            for dtype in collective.dtypes:
                for size in sizes:
                    self._context.events.step(f"{collective.name} {dtype} {size}", number, len(COLLECTIVES))
                    if not self._try(collective, dtype, size):
                        break

    def _try(self, collective: Collective, dtype: str, size: int) -> bool:
        """Run a collective twice, and record its result; return whether the backend has it."""
        ranks, record = self._ranks, self._context.record
        elements = size * ranks.world if collective.name in IN_PARTS else size
        host = [given(collective.name, dtype, elements, rank) for rank in range(ranks.world)]
        name = f"{dtype} {size}"
        try:
            first, second = self._results(collective, host[ranks.rank], name)
        except GroupError as error:
            cause = str(error.__cause__).lower()
            if not any(text in cause for text in _UNSUPPORTED):
                raise
            reason = f"{self._evidence['backend']} has no {collective.name} of {dtype}: {first_line_of(error)}"
            record.absent(STAGE, collective.name, dtype, status="skipped", reason=reason, rule=SPECS[STAGE].rule)
            return False
        expected = collective.expected(host, ranks.rank)
        digests = [digest(first), digest(second)]
        if not collective.is_same:
            self._judge_own(collective, name, first, expected)
        elif isinstance(expected, Sum):
            record_bounded(record, STAGE, collective.name, name, actual=first, exact=expected, digests=digests[:1])
        else:
            record.moved(
                STAGE, collective.name, name, actual=first, expected=expected, known=self._known(host),
                evidence=self._evidence,
            )  # fmt: skip
        self._compare(collective, name, [one.value for one in digests])
        return True

    def _judge_own(self, collective: Collective, name: str, actual: torch.Tensor, expected: torch.Tensor | Sum) -> None:
        """Record what no other rank has to get: without a digest, which would be compared with theirs."""
        word, share = None, None
        evidence: dict[str, Any] = dict(self._evidence)
        if isinstance(expected, Sum):
            found = measure_tracked(actual, expected)
            share = float(found.ratio or 0)
            status: RecordStatus = "within" if passes(share) else "outside"
            word = Word.DIFFERS if status == "outside" else None
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
        )  # fmt: skip

    def _known(self, host: Sequence[torch.Tensor]) -> Known:
        """Return what else a rank could hold: what another one gave."""
        given_by = [(f"what {name} gave", one) for name, one in zip(self._ranks.group.ranks, host, strict=True)]
        return Known(
            swapped=lambda tensor: next((name for name, one in given_by if torch.equal(tensor, one)), None)
        )  # fmt: skip

    def _results(self, collective: Collective, own: torch.Tensor, name: str) -> Iterator[torch.Tensor]:
        ranks = self._ranks
        with ranks.talking(f"{collective.name} of {name} elements"):
            runs = [collective.run(own.to(ranks.device, copy=True), ranks.rank, ranks.world) for _ in range(2)]
            return iter([one.to("cpu") for one in runs])

    def _compare(self, collective: Collective, name: str, digests: list[str]) -> None:
        """Record whether this rank has the bits of the others, and of its own second run."""
        ranks, record = self._ranks, self._context.record
        if digests[0] != digests[1]:
            record.fact(
                STAGE, collective.name, f"{name}, {REPEATED}", status="within",
                evidence={**self._evidence, "digests": digests},
                reason="a second run of the same sum gave other bits: its order is not fixed",
            )  # fmt: skip
        if not collective.is_same:
            return
        others = ranks.others_than(ranks.answers(f"{collective.name} {name}", digests[0]))
        record.fact(
            STAGE, collective.name, f"{name}, {SAME_BITS}", status="outside" if others else "equal",
            word=Word.DIFFERS if others else None, evidence=self._evidence,
            reason=f"other bits than on {some(others)}" if others else None,
        )  # fmt: skip


def first_line_of(error: GroupError) -> str:
    """Return what torch says of an error."""
    return str(error.__cause__).splitlines()[0]
