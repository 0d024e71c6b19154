"""Stage `collectives`: the ranks of a group send each other numbers and add them up, and each judges its own result.

The group is the workers of one kind that run side by side (`group.py`); after all of them, groups of two and of three
neighbours do the same at fewer sizes. NumPy draws the contribution of each rank, so each rank knows the result that it
has to get: moved elements, bit by bit; a sum, within the bound of any order. A result that all ranks get has to have
the same bits, whose digests they tell each other beside the collectives. Equal devices of another host may get other
bits of a sum of three or more: a library need not add up the ranks in the same order there. Rank 0 decides nothing for
others: a script that prints what rank 0 got says "correct" where all others are wrong.
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
from consistency.numerics.diagnosis_moved import OtherContents, diagnose_moved
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.distance import measure
from consistency.numerics.rules import Rule, passes
from consistency.numerics.running_error import Sum, measure_tracked
from consistency.numerics.words import Word
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
    """Run every collective of the level with the other ranks, and record this rank's results."""
    level = context.job.case.level

    def run_trials(ranks: JoinedGroup) -> None:
        _Trials(context, ranks).run(SIZES[level])
        for members in groups_of(ranks.world):
            ranks.exchange(f"groups of {len(members)} from {members[0]}", "")  # all, or some wait in a collective
            subgroup = ranks.subgroup(members)
            if subgroup is not None:
                _Trials(context, subgroup).run(SIZES_OF_SOME[level])

    run_in_group(context, STAGE, run_trials)


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
        self._group_name = "+".join(ranks.names) if self._of_some else f"{ranks.world} ranks"

    def run(self, sizes: Sequence[int]) -> None:
        """Try every collective with tensors of some sizes, in elements."""
        for number, collective in enumerate(EVERY_COLLECTIVE):
            if not self._context.record.wants(STAGE, collective.name):
                continue
            if collective.name == STRIDED and self._overlooks_gaps():
                reason = f"{self._evidence['backend']} adds up a tensor with gaps as if it had none: {_COPY}"
                self._record_unsupported(collective, "any dtype", reason)
                continue
            for dtype in collective.dtypes:
                self._try_sizes(number, collective, dtype, sizes)

    def _try_sizes(self, number: int, collective: Collective, dtype: str, sizes: Sequence[int]) -> None:
        """Try a collective in a dtype; a backend that does not have it at one size has it at none."""
        # several sizes may be cut to the same largest one
        limited_sizes = dict.fromkeys(collective.size(size, dtype, self._ranks.world) for size in sizes)
        for size in limited_sizes:
            step = f"{collective.name} {dtype} {size} of {self._group_name}"
            self._context.events.step(step, number, len(EVERY_COLLECTIVE))
            is_supported = self._try(collective, dtype, size)
            if size >= _LARGE:
                trim()
            if not is_supported:
                break

    def _try(self, collective: Collective, dtype: str, size: int) -> bool:
        """Run a collective twice, and record its result; return whether the backend has it."""
        ranks = self._ranks
        contributions = collective.contributions(dtype, size, ranks.world)
        name = f"{dtype} {size} of {self._group_name}"
        contribution = contributions[ranks.rank].whole()
        # twice, for a sum whose order is not fixed may have other bits the second time
        try:
            first = self._result(collective, contribution, name)
            second = self._result(collective, contribution, name)
        except (GroupError, ValueError) as error:
            # a backend that has no such collective says so on every rank, before anything is sent
            cause = error.__cause__ or error
            if not any(text in str(cause).lower() for text in _UNSUPPORTED):
                raise
            reason = f"{self._evidence['backend']} has no {collective.name} of {dtype}: {first_line(cause)}"
            self._record_unsupported(collective, dtype, reason)
            return False
        first_digest, second_digest = digest(first), digest(second)
        other_bits = second if first_digest.value != second_digest.value else None
        del contribution, second  # as large as what is expected, which is made now
        expected = collective.expected(contributions, ranks.rank)
        self._judge(collective, name, first, first_digest, expected, contributions)
        if other_bits is not None:
            self._judge_repeat(collective, name, other_bits, expected)
        self._compare(collective, name, first_digest.value)
        return True

    def _judge(
        self,
        collective: Collective,
        name: str,
        actual: torch.Tensor,
        actual_digest: TensorDigest,
        expected: torch.Tensor | Sum,
        contributions: Sequence[Contribution],
    ) -> None:
        """Record the result of this rank, as a row where all ranks of the group have to get the same."""
        record = self._context.record
        if not collective.is_same or self._of_some:
            self._judge_own(collective, name, actual, expected)
        elif isinstance(expected, Sum):
            # by itself: what another collective adds up does not reach this one
            with record.operations.apart():
                if self._ranks.world > 2:
                    record.operations.note(SUM_OVER_RANKS)
                record_bounded(
                    record, STAGE, collective.name, name, actual=actual, exact=expected, digests=[actual_digest]
                )
        else:
            row = TensorRecord(STAGE, collective.name, name, rule=Rule.BITWISE, status="equal", evidence=self._evidence)
            record.moved(row, actual=actual, expected=expected, other_contents=self._other_contents(contributions))

    def _record_unsupported(self, collective: Collective, tensor: str, reason: str) -> None:
        """Record why a collective is not tried, in a dtype or in any."""
        record, tensor = self._context.record, f"{tensor} of {self._group_name}"
        if self._of_some:  # a fact: of the ranks that are in other groups it is not expected
            record.fact(STAGE, collective.name, tensor, status="skipped", reason=reason)
        else:
            record.skipped(STAGE, reason, tensor, layer=collective.name)

    def _overlooks_gaps(self) -> bool:
        """Return whether the sum of any rank overlooks gaps: all have to skip a collective that one skips."""
        with self._ranks.in_collective("a sum of a tensor with gaps"):
            try:
                answer = overlooks_gaps(self._ranks)
            except ValueError:  # it refuses such a tensor, which is recorded of the collective itself
                answer = False
        return str(True) in self._ranks.exchange("gaps", str(answer))

    def _judge_own(self, collective: Collective, name: str, actual: torch.Tensor, expected: torch.Tensor | Sum) -> None:
        """Record a result that no other rank has to get: without a digest, which would be compared with theirs."""
        word, ratio = None, None
        evidence: dict[str, Any] = dict(self._evidence)
        if isinstance(expected, Sum):
            measured = measure_tracked(actual, expected)
            ratio = float(measured.ratio or 0)
            status: RecordStatus = "within"
            if not passes(ratio):
                status, word = "outside", words.DIFFERS
        else:
            measured = measure(actual, expected)
            status = "equal"
            if measured.mismatched:
                status, word = "outside", diagnose_moved(actual, expected, measured).word
        if status == "outside":
            evidence["wrong_elements"] = measured.mismatched
            evidence["worst_index"] = list(measured.worst_index or ())
        self._context.record.fact(
            STAGE, collective.name, name, status=status, word=word, ratio=ratio, evidence=evidence
        )

    def _other_contents(self, contributions: Sequence[Contribution]) -> OtherContents:
        """Return the contents that a rank could hold by mistake: the contribution of another one."""
        named = [(f"what {name} gave", gave) for name, gave in zip(self._ranks.names, contributions, strict=True)]

        def name_of(tensor: torch.Tensor) -> str | None:
            for name, contribution in named:
                if torch.equal(tensor, contribution.whole()):
                    return name
            return None

        return OtherContents(swapped=name_of)

    def _result(self, collective: Collective, contribution: torch.Tensor, name: str) -> torch.Tensor:
        """Run a collective on a copy of a contribution, which it may change, and return its result on the CPU."""
        ranks = self._ranks
        with ranks.in_collective(f"{collective.name} {name}"):
            return collective.run(contribution.to(ranks.device, copy=True), ranks).to("cpu")

    def _judge_repeat(
        self, collective: Collective, name: str, actual: torch.Tensor, expected: torch.Tensor | Sum
    ) -> None:
        """Record other bits in the second run: a sum may have another order then, and nothing else may change."""
        status: RecordStatus = "outside"
        word: Word | None = words.DIFFERS
        reason = "a second run gave other bits, which are wrong"
        if isinstance(expected, Sum) and passes(float(measure_tracked(actual, expected).ratio or 0)):
            status, word = "within", None
            reason = "a second run of the same sum gave other bits, within tolerance: its order is not fixed"
        self._context.record.fact(
            STAGE,
            collective.name,
            f"{name}, {REPEATED}",
            status=status,
            word=word,
            evidence=self._evidence,
            reason=reason,
        )

    def _compare(self, collective: Collective, name: str, own_digest: str) -> None:
        """Record whether this rank has the bits of the others; each waits here for all to have judged theirs."""
        ranks = self._ranks
        digests = ranks.exchange(f"{collective.name} {name}", own_digest)
        if not collective.is_same:
            return
        status: RecordStatus = "equal"
        word, reason = None, None
        if others := ranks.ranks_against(digests):
            status, word, reason = "outside", words.DIFFERS, f"other bits than on {some(others)}"
        self._context.record.fact(
            STAGE,
            collective.name,
            f"{name}, {SAME_BITS}",
            status=status,
            word=word,
            evidence=self._evidence,
            reason=reason,
        )


_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "HCCL_", "CCL_")

_PRIVATE = frozenset({
    "ADDR", "COMM", "DIR", "FILE", "HOST", "HOSTID", "ID", "IP", "KEY", "PASSWORD", "PATH", "SECRET", "SERVER", "TOKEN",
    "WHITELIST",
})  # fmt: skip
"""Parts of the names of variables whose values may be a host, a path, or a secret."""

_CHOICES = {"algorithm": "NCCL_ALGO", "protocol": "NCCL_PROTO"}
"""Names in the evidence of choices that NCCL makes, each with the variable that makes it instead."""


def variables() -> dict[str, str]:
    """Return the variables of this process that set options of a library of collectives, without private ones."""
    names = [name for name in sorted(os.environ) if name.startswith(_PREFIXES)]
    return {name: os.environ[name] for name in names if _PRIVATE.isdisjoint(name.split("_"))}


def facts(ranks: JoinedGroup) -> dict[str, Any]:
    """Return, for the evidence of rows, the ranks, their backend, and its known choices: NCCL does not tell its own."""
    backend = str(dist.get_backend(ranks.process_group))
    evidence: dict[str, Any] = {"ranks": list(ranks.names), "backend": backend}
    if backend == "nccl":
        evidence["version"] = ".".join(map(str, torch.cuda.nccl.version()))
        evidence |= {choice: os.environ.get(name) or "chosen by NCCL" for choice, name in _CHOICES.items()}
    if set_variables := variables():
        evidence["variables"] = set_variables
    return evidence
