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
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted
from consistency.extras.training.group_stage import in_group, to_train
from consistency.extras.training.parts_judging import who_else
from consistency.extras.training.ranks.group import Joined
from consistency.extras.training.replicas.spec import REPLICAS
from consistency.extras.training.sizes import STEPS
from consistency.extras.training.step_judging import StepJudge
from consistency.extras.training.steps import AVERAGED, UPDATED, batches_of, own_gradients, trained_by
from consistency.numerics import words
from consistency.numerics.digest import digest
from consistency.numerics.rules import Rule
from consistency.worker.context import Context
from consistency.worker.training.backward import parts_of, put_back, trainable

STAGE = REPLICAS
START = "start"
DRIFT = "drift"


def run(context: Context) -> None:
    """Train with the other ranks, record what each step left, and put the adapter back as it was."""
    inputs, names = to_train(context)
    in_group(context, STAGE, lambda ranks: _Replica(context, ranks, names).run(parts_of(inputs)))


class _Replica:
    """One rank's model."""

    def __init__(self, context: Context, ranks: Joined, names: Sequence[str]) -> None:
        self._context = context
        self._ranks = ranks
        self._parameters = {name: context.model.get_parameter(name) for name in names}

    def run(self, parts: Sequence[dict[str, torch.Tensor]]) -> None:
        context, ranks = self._context, self._ranks
        with ExitStack() as stack:
            stack.enter_context(trainable(context.model, self._parameters.values()))
            # the first rank's buffers are sent to all before each pass: unlike devices compute rotary tables otherwise
            stack.enter_context(put_back({**self._parameters, **dict(context.model.named_buffers())}))
            with ranks.calling("DistributedDataParallel"):
                # as transformers' Trainer does: prompts and experts may leave parameters without a gradient
                wrapped = DistributedDataParallel(context.model, find_unused_parameters=True)
            other_start = False
            for name, parameter in self._parameters.items():
                layer, part = adapter_place(context.expected[name][0])
                expected = context.expected[name][1].to(parameter.dtype)
                digests = digest(parameter.detach()), digest(expected)
                other_start |= digests[0].value != digests[1].value
                row = TensorRecord(STAGE, layer, f"{part}.{START}", rule=Rule.BITWISE, status="equal")
                context.record.moved(row, actual=parameter.detach(), expected=expected, digests=digests)
            start = {name: parameter.detach().to("cpu", copy=True) for name, parameter in self._parameters.items()}
            files = stack.enter_context(
                trained_by(
                    ranks,
                    "replicas",
                    context.model,
                    self._parameters,
                    batches_of(parts, rank=ranks.rank, world=ranks.world),
                    call=wrapped,
                    watching=own_gradients(self._parameters),
                )
            )
            judge = StepJudge(context, ranks, STAGE, files)
            names = [name for name in self._parameters if files[ranks.rank].read(AVERAGED, name) is not None]
            wrong = {name for name in names if not judge.averaged(name)}
            differing = judge.compare(AVERAGED, names, "averaged gradients", explained=wrong)
            for name in names:
                judge.updated(name, start[name])
            if reason := who_else(ranks, "another start or other gradients", is_here=other_start or bool(differing)):
                context.record.skipped(STAGE, reason, DRIFT)
            else:
                self._drift(judge, names, start)
        self._check_base()

    def _drift(self, judge: StepJudge, names: Sequence[str], start: Mapping[str, torch.Tensor]) -> None:
        """Record how far this rank's adapter is from that of the rank that others are compared with."""
        odd = judge.odd(UPDATED, names, STEPS - 1)
        share = max((judge.apart(name, start[name], others[0]) for name, others in odd.items()), default=0.0)
        if odd:
            self._context.record.fact(
                STAGE,
                WHOLE_MODEL,
                DRIFT,
                status="within" if share <= 1 else "outside",
                share=share,
                word=words.DIFFERS,
                evidence={"tensors": len(odd), "of": len(names), "steps": STEPS, "ranks": next(iter(odd.values()))},
                reason=f"{len(odd)} of {counted(len(names), 'tensor')} of the adapter differ after {STEPS} steps",
            )

    def _check_base(self) -> None:
        """Record the tensors of the base that DistributedDataParallel's broadcast changed, which it must not."""
        changed = self._changed()
        for name in changed:
            layer, _, part = name.rpartition(".")
            self._context.record.fact(
                STAGE,
                layer,
                f"{part}.base",
                status="outside",
                word=words.BYTES_CHANGED,
                reason="changed by DistributedDataParallel's broadcast from the first rank",
            )
        if changed:
            raise RuntimeError(f"DistributedDataParallel changed {counted(len(changed), 'tensor')} of the base")

    def _changed(self) -> list[str]:
        known = self._context.base.digests
        rewritten = self._context.rewritten
        return [
            name
            for name, tensor in self._context.base.on_device()
            if name in known and name not in rewritten and digest(tensor).value != known[name].value
        ]
