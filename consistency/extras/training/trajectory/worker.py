"""Stage `trajectory`: some steps of training on each device alone, all with the same data and from the same bytes.

Each step is judged by itself: its gradients, by blocks, at the parameters of an exact training (`step_checks`); the
parameters after each step of the device's own training, by the bound of the optimizer's exact step from the gradients
that this device computed. Beside that stands the curve of its own training: loss, norm of the gradients, and the
adapter's distance from the exact training, against those of trainings with noise (`yardstick`). The adapter is put
back afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import RecordStatus
from consistency.case.stages import SPECS
from consistency.devices.backends import CPU
from consistency.extras.training.group_stage import training_inputs
from consistency.extras.training.step_judging import StepJudge
from consistency.extras.training.steps import AVERAGED, UPDATED, StepFile
from consistency.extras.training.trajectory.cost import STEPS
from consistency.extras.training.trajectory.passes import TrainingPasses, own_optimizer
from consistency.extras.training.trajectory.passes_of_steps import OWN
from consistency.extras.training.trajectory.spec import TRAJECTORY
from consistency.extras.training.trajectory.step_checks import StepChecks
from consistency.extras.training.trajectory.yardstick import (
    FIGURES,
    distance_to_exact,
    finite_or_none,
    reference_figures,
)
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.model.float64_reference import Reference, give_up, wait_for
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import model_code
from consistency.worker.protocol import TRAJECTORY_FILE
from consistency.worker.recorder import Skip
from consistency.worker.training.backward import Tensors, parts_of

STAGE = TRAJECTORY


@dataclass(slots=True, kw_only=True)
class _OwnTraining:
    """The results of this device's own training."""

    file: StepFile
    """Gradients and parameters of each step."""
    start: Tensors
    """The parameters before the first step, on the CPU."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def run(context: Context) -> None:
    """Train, judge every step, and record the curve."""
    try:
        inputs, names = training_inputs(context)
    except Skip:
        _give_up_reference(context, "it does not train this adapter")
        raise
    batches, steps = parts_of(inputs), context.job.case.steps or STEPS
    passes = TrainingPasses(context.model, names, batches, began=context.events.block)
    with ExitStack() as stack:
        stack.enter_context(passes.training())
        try:
            with model_code(context.model, "the backward pass of this model fails: "):
                training = stack.enter_context(_trained(context, passes, steps))
        except Skip as skip:
            _give_up_reference(context, str(skip))
            raise
        _check_steps(context, passes, batches, training.start, steps)
        judge = StepJudge(context, None, STAGE, [training.file])
        for name in names:
            judge.judge_parameter(name, training.start[name])
        _record_curve(context, training)


def _check_steps(
    context: Context, passes: TrainingPasses, batches: Sequence[Tensors], start: Tensors, steps: int
) -> None:
    """Judge the gradients of every step; the worker that makes the reference makes it here, on the CPU."""
    reference_passes = None
    with ExitStack() as stack:
        if context.job.makes_reference:
            reference_passes = passes
            if context.device.type != CPU:
                names = list(passes.parameters)
                with context.events.on_cpu():
                    model = load_model(context.job.case, CPU)
                    reference_passes = TrainingPasses(model, names, batches, began=context.events.block)
                # the reference starts from the files: what this device's own parameters hold is checked by others
                start = reference_passes.copy_parameters()
                stack.enter_context(reference_passes.training())
        StepChecks(context, passes, reference_passes, start, steps).check()


@contextmanager
def _trained(context: Context, passes: TrainingPasses, steps: int) -> Iterator[_OwnTraining]:
    """Train on this device, and yield the results of each step, in files that are removed at the end."""
    # workers share the folder: the process id keeps their files apart
    stem = context.scratch / f"trajectory-{os.getpid()}"
    parameters = passes.parameters
    file = StepFile(stem.with_suffix(".safetensors"), parameters, steps=steps, kinds=(AVERAGED, UPDATED))
    training = _OwnTraining(file=file, start=passes.copy_parameters())
    try:
        # every result is written at once: all steps together would not fit in memory
        optimizer = own_optimizer(parameters.values())
        for step in range(steps):
            with context.events.passes(OWN):
                context.events.step(f"step {step + 1}", step, steps)
                result = passes.run_own_pass(step)
            training.losses.append(result.loss)
            training.norms.append(result.norm)
            for name, parameter in parameters.items():
                parameter.grad = result.gradients[name].to(parameter.device)
                file.write(AVERAGED, step, name, parameter.grad)
            optimizer.step()
            for name, parameter in parameters.items():
                file.write(UPDATED, step, name, parameter)
        optimizer.zero_grad()
        yield training
    finally:
        file.close(remove=True)


def _give_up_reference(context: Context, reason: str) -> None:
    """Tell the workers that wait for the reference why they get none, if this worker was to make it."""
    if context.job.makes_reference:
        give_up(context.scratch, TRAJECTORY_FILE, f"{context.job.name}, which computes it, gives none: {reason}")


def _record_curve(context: Context, training: _OwnTraining) -> None:
    """Record the figures of every step, with the range of noisy trainings; no limit applies to them."""
    answer = wait_for(context.scratch, context.events, TRAJECTORY_FILE)
    evidence: dict[str, object] = {"steps": training.file.steps}
    distances: Sequence[float] = ()
    reason = None
    if isinstance(answer, Reference):
        distances = [_distance_after(training, answer, step) for step in range(training.file.steps)]
        products = cpu_error.products_on(context.model, context.device)
        evidence |= reference_figures(answer, products)
    else:
        reason = answer
    figures = (training.losses, training.norms, distances)
    evidence |= {name: finite_or_none(values) for name, values in zip(FIGURES, figures, strict=True)}
    is_exact = bool(distances) and not any(distances)
    status: RecordStatus = "equal" if is_exact else "within"
    context.record.fact(STAGE, WHOLE_MODEL, SPECS[STAGE].whole, status=status, evidence=evidence, reason=reason)


def _distance_after(training: _OwnTraining, reference: Reference, step: int) -> float:
    parameters = ((name, training.file.tensor(UPDATED, name, step)) for name in training.start)
    return distance_to_exact(parameters, reference, step)
