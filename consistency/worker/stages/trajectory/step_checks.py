"""Judge the gradients of each step, by blocks, at the parameters of a training in float64.

A trajectory as a whole cannot be judged: near a gradient of zero the optimizer goes either way, so healthy trainings
part by any multiple of what rounding makes. One step can: every device computes its gradients at the same parameters,
those that a training in float64 has before it, on what its blocks are given (`stages/gradient/by_blocks.py`). Nothing
that an earlier step did is held against a later one, so the first step outside is where it began.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from consistency.capture.names import WHOLE_MODEL
from consistency.case.stages import SPECS, Stage
from consistency.devices.backends import CPU
from consistency.errors import first_line
from consistency.numerics.digest import digest
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rules import passes as is_within
from consistency.worker import cpu_error
from consistency.worker.decisions.replay import Replay
from consistency.worker.decisions.track import Track
from consistency.worker.model import half_kernels
from consistency.worker.model.float64_reference import Reference, give_up, publish, wait_for
from consistency.worker.model.running import is_of_the_model
from consistency.worker.protocol import DECISIONS_FILE, STEP_FILE
from consistency.worker.stages.block_rule import block_ratio, record_block
from consistency.worker.stages.context import Context
from consistency.worker.stages.decision_flips import record_flips
from consistency.worker.stages.gradient.by_blocks import in_float64, with_noise
from consistency.worker.stages.gradient.stage import row_of
from consistency.worker.stages.trajectory.passes import TrainingPasses
from consistency.worker.training.backward import Tensors

STAGE = Stage.TRAJECTORY
STEPWISE = "steps"
"""Tensor of the row that says why gradients are not judged."""

OTHER_DECISIONS = "at {} of {} steps the device decides by other operations than float64: not judged there"


class StepChecks:
    """Judges the gradients of each step; of every tensor it records the first that is outside, or the last one.

    Parameters
    ----------
    twin : TrainingPasses or None
        Of the same model on the CPU, where this worker makes what all are judged by.
    start : dict
        The parameters before the first step, on the CPU.
    exact : Reference
        Has the parameters of the training in float64 after each step.
    """

    def __init__(
        self, context: Context, own: TrainingPasses, twin: TrainingPasses | None, start: Tensors, exact: Reference
    ) -> None:
        self._context = context
        self._own = own
        self._twin = twin
        self._start = start
        self._exact = exact
        self._recorded: set[str] = set()
        self._has_flipped = False

    def check(self, steps: int) -> None:
        """Judge every step, and record why one is not."""
        left_out, reason = 0, ""
        for step in range(steps):
            self._context.events.step(f"step {step + 1}, by blocks", step, steps)
            values = self._before(step)
            answer = self._answer(step, values)
            if isinstance(answer, str):
                reason = answer
                break
            left_out += not self._judge(step, values, answer, is_last=step == steps - 1)
        if reason or left_out:
            self._context.record.absent(
                STAGE, WHOLE_MODEL, STEPWISE, status="skipped", rule=SPECS[STAGE].rule,
                reason=reason or OTHER_DECISIONS.format(left_out, steps),
            )  # fmt: skip

    def _before(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return the parameters before a step."""
        if not step:
            return self._start
        found = {name: self._exact.read(name) for name in self._start}
        return {name: mapped(values)[step - 1] for name, values in found.items() if values is not None}

    def _answer(self, step: int, values: Mapping[str, torch.Tensor]) -> Reference | str:
        """Return what all are judged by at a step, or why nothing is."""
        context, file = self._context, STEP_FILE.format(step)
        if self._twin is None:
            return wait_for(context.scratch, context.events, file)
        on_cpu = context.device.type == CPU
        with nullcontext() if on_cpu else context.events.on_cpu():
            self._twin.begin(values)
            try:
                return self._make(step, self._twin)
            except Exception as error:  # code that insists on its own dtype
                if not is_of_the_model(error, self._twin.model):
                    raise
                give_up(context.scratch, file, first_line(error))
                return first_line(error)

    def _make(self, step: int, twin: TrainingPasses) -> Reference:
        context, (of, _) = self._context, twin.backward(step)
        track = Track(_decisions(context, step))
        exact = in_float64(of, track)
        tensors, tables = exact.tensors_with(with_noise(context, of, exact, track), of.wanted)
        track.publish()
        file = STEP_FILE.format(step)
        if context.job.others_wait:
            publish(context.scratch, tensors, tables, file)
        return Reference(path=context.scratch / file, tables=tables, made=tensors)

    def _judge(self, step: int, values: Mapping[str, torch.Tensor], answer: Reference, *, is_last: bool) -> bool:
        """Judge the gradients of one step; return whether they can be."""
        context = self._context
        self._own.begin(values)
        title = cpu_error.products_on(context.model, context.device)
        replay = Replay(_decisions(context, step), context.model, title)
        found = self._own.own_by_blocks(step, answer, replay)
        beyond = [flip for flip in replay.flips if not flip.is_undecided]
        if beyond and not self._has_flipped:
            self._has_flipped = True
            record_flips(context, STAGE, beyond, more={"step": step + 1})
        if not replay.is_complete():
            return False
        for name, gradient in found.items():
            layer, tensor = row_of(context, name)
            if name in self._recorded or 0 in gradient.shape or not context.record.wants(STAGE, layer):
                continue
            if answer.read(name) is None:
                continue
            ratio = block_ratio(context, STAGE, layer, gradient, answer, name)
            if is_last or (ratio is not None and not is_within(ratio)):
                self._recorded.add(name)
                record_block(
                    context, STAGE, layer, tensor, actual=gradient, digests=[digest(gradient)], reference=answer,
                    name=name, exact_name=name, computed_by=half_kernels.described(self._own.kernels),
                    more={"step": step + 1},
                )  # fmt: skip
        return True


def _decisions(context: Context, step: int) -> Path:
    return context.scratch / DECISIONS_FILE.format(f"{STAGE}-{step}")
