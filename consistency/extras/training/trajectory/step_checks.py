"""Judge the gradients of each step, by blocks, at the parameters of an exact training.

A trajectory as a whole cannot be judged: near a gradient of zero the optimizer goes either way, so healthy trainings
part by any multiple of what rounding makes. One step can: every device computes its gradients at the same parameters,
those of a training by exact gradients, on what its blocks are given (`stages/gradients.py`). Nothing that an
earlier step did is held against a later one, so the first step outside is where it began.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import torch

from consistency.capture.records import TensorRecord
from consistency.devices.backends import CPU
from consistency.extras.training.trajectory.passes import TrainingPasses
from consistency.extras.training.trajectory.passes_of_steps import BY_BLOCKS, DRAWN
from consistency.extras.training.trajectory.spec import STEPWISE, TRAJECTORY
from consistency.extras.training.trajectory.yardstick import ExactTraining
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rules import Rule
from consistency.numerics.rules import passes as is_within
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.decisions.replay import Replay
from consistency.worker.decisions.track import Track
from consistency.worker.judging.block_rule import block_ratio, record_block, record_flips
from consistency.worker.judging.gradients import in_float64, row_of, with_noise
from consistency.worker.model import half_kernels
from consistency.worker.model.float64_reference import Reference, give_up, publish, wait_for
from consistency.worker.model.running import model_code
from consistency.worker.protocol import DECISIONS_FILE, STEP_FILE, TRAJECTORY_FILE
from consistency.worker.recorder import Skip
from consistency.worker.training.backward import Tensors

STAGE = TRAJECTORY

OTHER_DECISIONS = "at {} of {} steps the device decides by other operations than float64: not judged there"


class StepChecks:
    """Judges the gradients of each step; of every tensor it records the first that is outside, or the last one.

    Parameters
    ----------
    own : TrainingPasses
        Passes on the device that is checked.
    reference_passes : TrainingPasses or None
        Passes of the same model on the CPU, where this worker makes the reference of all; else None.
    start : dict
        The parameters before the first step, on the CPU.
    """

    def __init__(
        self, context: Context, own: TrainingPasses, reference_passes: TrainingPasses | None, start: Tensors, steps: int
    ) -> None:
        self._context = context
        self._own = own
        self._reference_passes = reference_passes
        self._steps = steps
        self._training = None
        if reference_passes is not None:
            self._training = ExactTraining(context, reference_passes, start, steps)
        self._recorded: set[str] = set()
        self._has_flipped = False

    def check(self) -> None:
        """Judge every step, and record why one is not."""
        left_out, reason = 0, ""
        events, steps = self._context.events, self._steps
        # passes of a step before its own: one in float64, and the noisy ones
        own_start = 0.0 if self._reference_passes is None else (1 + DRAWN) / (2 + DRAWN)
        for step in range(steps):
            with events.passes(BY_BLOCKS), events.part_of_stage(step / steps, (step + 1) / steps):
                answer = self._reference_of_step(step)
                # without the reference of a step there is none of a later one
                if isinstance(answer, str):
                    reason = answer
                    break
                with events.part_of_stage(own_start, 1.0):
                    events.step(f"step {step + 1}, by blocks", 0, 1)
                    left_out += not self._judge(step, answer)
        if self._training is not None and not reason:
            with self._on_cpu():
                self._training.publish()
        if reason or left_out:
            reason = reason or OTHER_DECISIONS.format(left_out, self._steps)
            self._context.record.skipped(STAGE, reason, STEPWISE)

    def _on_cpu(self) -> AbstractContextManager[None]:
        return nullcontext() if self._context.device.type == CPU else self._context.events.on_cpu()

    def _reference_of_step(self, step: int) -> Reference | str:
        """Return the reference of a step, or why there is none."""
        context = self._context
        if self._reference_passes is None or self._training is None:
            return wait_for(context.scratch, context.events, STEP_FILE.format(step))
        with self._on_cpu():
            try:
                with model_code(self._reference_passes.model):  # code may insist on its own dtype
                    return self._make_reference(step, self._reference_passes, self._training)
            except Skip as skip:
                self._training.close()
                give_up(context.scratch, TRAJECTORY_FILE, str(skip))
                return str(skip)

    def _make_reference(self, step: int, passes: TrainingPasses, training: ExactTraining) -> Reference:
        """Compute the exact gradients of a step and their noise, take the step, and publish the reference.

        It has the parameters before the step too, at which every device computes its gradients.
        """
        context, parameters = self._context, training.parameters
        passes.set_parameters(parameters)
        backward, loss = passes.backward_of_step(step)
        track = Track(_decisions_path(context, step))
        with context.events.part_of_stage(0.0, 1 / (2 + DRAWN)):
            context.events.step(f"step {step + 1}, float64", 0, 1)
            exact = in_float64(backward, track)
        result = passes.result(loss, exact.gradients, torch.float64)
        with context.events.part_of_stage(1 / (2 + DRAWN), (1 + DRAWN) / (2 + DRAWN)):
            drawn = with_noise(context, backward, exact, track, most=DRAWN)
        tensors, tables = exact.tensors_with(drawn, backward.parameters)
        track.publish()
        training.take_step(step, result)
        tensors |= {_name_before(name): tensor for name, tensor in parameters.items()}
        tables = msgspec.structs.replace(tables, names=tuple(tensors))
        file = STEP_FILE.format(step)
        # a file only for workers that wait: this one has the tensors
        if context.job.others_wait:
            publish(context.scratch, tensors, tables, file)
        return Reference(path=context.scratch / file, tables=tables, in_memory=tensors)

    def _judge(self, step: int, reference: Reference) -> bool:
        """Judge the gradients of one step; return whether they can be."""
        context = self._context
        parameters = {name: reference.read(_name_before(name)) for name in self._own.parameters}
        self._own.set_parameters({name: mapped(tensor) for name, tensor in parameters.items() if tensor is not None})
        title = cpu_error.products_on(context.model, context.device)
        replay = Replay(_decisions_path(context, step), context.model, title)
        gradients = self._own.own_by_blocks(step, reference, replay)
        wrong_flips = [flip for flip in replay.flips if not flip.is_undecided]
        if wrong_flips and not self._has_flipped:
            self._has_flipped = True
            record_flips(context, STAGE, wrong_flips, evidence={"step": step + 1})
        # other decisions lead to other gradients, which no reference has
        if not replay.is_complete():
            return False
        for name, gradient in gradients.items():
            self._judge_gradient(step, name, gradient, reference)
        return True

    def _judge_gradient(self, step: int, name: str, gradient: torch.Tensor, reference: Reference) -> None:
        """Record a gradient if it is outside or of the last step, unless one of an earlier step is recorded."""
        context, is_last = self._context, step == self._steps - 1
        layer, tensor = row_of(context, name)
        if name in self._recorded or 0 in gradient.shape or not context.record.wants(STAGE, layer):
            return
        if reference.read(name) is None:
            return
        ratio = block_ratio(context, STAGE, layer, gradient, reference, name)
        # a tensor that stays inside has one row, that of the last step
        is_outside = ratio is not None and not is_within(ratio)
        if is_last or is_outside:
            self._recorded.add(name)
            evidence = {"step": step + 1, **half_kernels.evidence(self._own.kernels)}
            row = TensorRecord(STAGE, layer, tensor, rule=Rule.BLOCK, status="measured", evidence=evidence)
            record_block(context, row, gradient, reference=reference, name=name)


def _name_before(name: str) -> str:
    """Return the name, in the file of a step, of a parameter before that step."""
    return f"before::{name}"


def _decisions_path(context: Context, step: int) -> Path:
    return context.scratch / DECISIONS_FILE.format(f"{STAGE}-{step}")
