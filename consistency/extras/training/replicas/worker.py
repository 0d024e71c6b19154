"""Stage `replicas`: the ranks of a group train the adapter by DistributedDataParallel, each on its own batch.

Before the first step every rank holds the bytes of the file. In each step the gradient that a rank's optimizer gets is
the average of all ranks' own gradients, within the bound of any order, and has the same bits on all ranks; the
parameter afterwards is that of the optimizer's exact steps from those bits, within their bound. Ranks that run the same
program keep the same bits; how far others drift apart is a fact, with its size against what the two bounds allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch.nn.parallel import DistributedDataParallel

from consistency.capture.names import WHOLE_MODEL, adapter_place
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.capture.wording import counted
from consistency.extras.training.group_stage import run_in_group, training_inputs
from consistency.extras.training.parts_judging import reason_on_ranks
from consistency.extras.training.ranks.group import JoinedGroup
from consistency.extras.training.replicas.spec import REPLICAS
from consistency.extras.training.sizes import STEPS
from consistency.extras.training.step_judging import StepJudge
from consistency.extras.training.steps import (
    AVERAGED,
    UPDATED,
    StepFile,
    batches_of,
    trained_by,
    watch_own_gradients,
)
from consistency.numerics import words
from consistency.numerics.digest import digest
from consistency.numerics.rules import Rule
from consistency.worker.context import Context
from consistency.worker.training.backward import Tensors, parts_of, put_back, trainable

STAGE = REPLICAS
START = "start"
DRIFT = "drift"


def run(context: Context) -> None:
    """Train with the other ranks, record the results of each step, and put the adapter back as it was."""
    inputs, names = training_inputs(context)
    run_in_group(context, STAGE, lambda ranks: _Replica(context, ranks, names).run(parts_of(inputs)))


class _Replica:
    """The training of one rank's model."""

    def __init__(self, context: Context, ranks: JoinedGroup, names: Sequence[str]) -> None:
        self._context = context
        self._ranks = ranks
        self._parameters = {name: context.model.get_parameter(name) for name in names}

    def run(self, parts: Sequence[Tensors]) -> None:
        """Train on this rank's parts of the batch, and judge the training."""
        context, ranks = self._context, self._ranks
        with ExitStack() as stack:
            stack.enter_context(trainable(context.model, self._parameters.values()))
            # the first rank's buffers are sent to all before each pass: unlike devices compute rotary tables otherwise
            stack.enter_context(put_back({**self._parameters, **dict(context.model.named_buffers())}))
            with ranks.in_library("DistributedDataParallel"):
                # as transformers' Trainer does: prompts and experts may leave parameters without a gradient
                wrapped = DistributedDataParallel(context.model, find_unused_parameters=True)
            has_other_start = self._record_start()
            start = {name: parameter.detach().to("cpu", copy=True) for name, parameter in self._parameters.items()}
            training = trained_by(
                ranks,
                "replicas",
                context.model,
                self._parameters,
                batches_of(parts, rank=ranks.rank, world=ranks.world),
                call=wrapped,
                watch=watch_own_gradients(self._parameters),
            )
            files = stack.enter_context(training)
            self._judge(files, start, has_other_start=has_other_start)
        self._check_base()

    def _record_start(self) -> bool:
        """Record whether the library left this rank with the file's bytes; return whether any tensor has others."""
        context, has_other_start = self._context, False
        for name, parameter in self._parameters.items():
            layer, tensor = adapter_place(context.expected[name][0])
            expected = context.expected[name][1].to(parameter.dtype)
            digests = digest(parameter.detach()), digest(expected)
            has_other_start |= digests[0].value != digests[1].value
            row = TensorRecord(STAGE, layer, f"{tensor}.{START}", rule=Rule.BITWISE, status="equal")
            context.record.moved(row, actual=parameter.detach(), expected=expected, digests=digests)
        return has_other_start

    def _judge(self, files: Sequence[StepFile], start: Tensors, *, has_other_start: bool) -> None:
        """Record gradients and parameters of each step, and how far the ranks have drifted apart."""
        ranks = self._ranks
        judge = StepJudge(self._context, ranks, STAGE, files)
        # prompts and experts may leave parameters without a gradient
        names = [name for name in self._parameters if files[ranks.rank].read(AVERAGED, name) is not None]
        wrong = {name for name in names if not judge.judge_average(name)}
        differing = judge.compare_ranks(AVERAGED, names, "averaged gradients", explained=wrong)
        for name in names:
            judge.judge_parameter(name, start[name])
        is_explained = has_other_start or bool(differing)
        if reason := reason_on_ranks(ranks, "another start or other gradients", is_here=is_explained):
            self._context.record.skipped(STAGE, reason, DRIFT)
        else:
            self._record_drift(judge, names, start)

    def _record_drift(self, judge: StepJudge, names: Sequence[str], start: Mapping[str, torch.Tensor]) -> None:
        """Record the distance of this rank's adapter from the adapter of the rank that others are compared with."""
        differing = judge.differing(UPDATED, names, STEPS - 1)
        if not differing:
            return
        ratio = max(judge.drift_ratio(name, start[name], others[0]) for name, others in differing.items())
        status: RecordStatus = "within" if ratio <= 1 else "outside"
        self._context.record.fact(
            STAGE,
            WHOLE_MODEL,
            DRIFT,
            status=status,
            ratio=ratio,
            word=words.DIFFERS,
            evidence={
                "tensors": len(differing),
                "of": len(names),
                "steps": STEPS,
                "ranks": next(iter(differing.values())),
            },
            reason=f"{len(differing)} of {counted(len(names), 'tensor')} of the adapter differ after {STEPS} steps",
        )

    def _check_base(self) -> None:
        """Record the tensors of the base that DistributedDataParallel's broadcast changed, which it must not."""
        changed_names = self._changed_names()
        for name in changed_names:
            layer, _, tensor = name.rpartition(".")
            self._context.record.fact(
                STAGE,
                layer,
                f"{tensor}.base",
                status="outside",
                word=words.BYTES_CHANGED,
                reason="changed by DistributedDataParallel's broadcast from the first rank",
            )
        # the stages after this one would compute with another base
        if changed_names:
            raise RuntimeError(f"DistributedDataParallel changed {counted(len(changed_names), 'tensor')} of the base")

    def _changed_names(self) -> list[str]:
        """Return the names of the base's tensors whose bytes are not those that were recorded before."""
        digests = self._context.base.digests
        rewritten = self._context.rewritten
        changed_names = []
        for name, tensor in self._context.base.on_device():
            is_known = name in digests and name not in rewritten
            if is_known and digest(tensor).value != digests[name].value:
                changed_names.append(name)
        return changed_names
