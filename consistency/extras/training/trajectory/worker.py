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
from consistency.case.stages import SPECS
from consistency.devices.backends import CPU
from consistency.extras.training.group_stage import to_train
from consistency.extras.training.step_judging import StepJudge
from consistency.extras.training.steps import AVERAGED, UPDATED, StepFile
from consistency.extras.training.trajectory.cost import STEPS
from consistency.extras.training.trajectory.passes import TrainingPasses, own_optimizer
from consistency.extras.training.trajectory.passes_of_steps import OWN
from consistency.extras.training.trajectory.spec import TRAJECTORY
from consistency.extras.training.trajectory.step_checks import StepChecks
from consistency.extras.training.trajectory.yardstick import (
    FIGURES,
    distance_from,
    finite,
    known_figures,
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
class _Trained:
    """What this device's training left."""

    file: StepFile
    start: Tensors
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def run(context: Context) -> None:
    """Train, judge every step, and record the curve."""
    try:
        inputs, names = to_train(context)
    except Skip:
        _no_reference(context, "it does not train this adapter")
        raise
    parts, steps = parts_of(inputs), context.job.case.steps or STEPS
    passes = TrainingPasses(context.model, names, parts, began=context.events.block)
    with ExitStack() as stack:
        stack.enter_context(passes.training())
        try:
            with model_code(context.model, "the backward pass of this model fails: "):
                own = stack.enter_context(_trained(context, passes, steps))
        except Skip as skip:
            _no_reference(context, str(skip))
            raise
        twin, start = (passes if context.job.makes_reference else None), own.start
        with ExitStack() as of_twin:
            if twin is not None and context.device.type != CPU:
                with context.events.on_cpu():
                    twin = TrainingPasses(load_model(context.job.case, CPU), names, parts, began=context.events.block)
                start = twin.values()  # what this device's own parameters hold is checked by others
                of_twin.enter_context(twin.training())
            StepChecks(context, passes, twin, start, steps).check()
        judge = StepJudge(context, None, STAGE, [own.file])
        for name in names:
            judge.updated(name, own.start[name])
        _record_curve(context, own)


@contextmanager
def _trained(context: Context, passes: TrainingPasses, steps: int) -> Iterator[_Trained]:
    """Train on this device, and yield what each step left, in files that are removed at the end."""
    stem = context.scratch / f"trajectory-{os.getpid()}"  # the folder is all workers'
    parameters = passes.parameters
    file = StepFile(stem.with_suffix(".safetensors"), parameters, steps=steps, kinds=(AVERAGED, UPDATED))
    found = _Trained(file=file, start=passes.values())
    try:
        optimizer = own_optimizer(parameters.values())
        for step in range(steps):
            with context.events.passes(OWN):
                context.events.step(f"step {step + 1}", step, steps)
                taken = passes.take_own(step)
            found.losses.append(taken.loss)
            found.norms.append(taken.norm)
            for name, parameter in parameters.items():
                parameter.grad = taken.gradients[name].to(parameter.device)
                file.write(AVERAGED, step, name, parameter.grad)
            optimizer.step()
            for name, parameter in parameters.items():
                file.write(UPDATED, step, name, parameter)
        optimizer.zero_grad()
        yield found
    finally:
        file.close(remove=True)


def _no_reference(context: Context, reason: str) -> None:
    if context.job.makes_reference:
        give_up(context.scratch, TRAJECTORY_FILE, f"{context.job.name}, which computes it, gives none: {reason}")


def _record_curve(context: Context, own: _Trained) -> None:
    """Record the figures of every step, with those that rounding makes of them; no limit applies to them."""
    answer = wait_for(context.scratch, context.events, TRAJECTORY_FILE)
    evidence: dict[str, object] = {"steps": own.file.steps}
    distances: Sequence[float] = ()
    if isinstance(answer, Reference):
        distances = [
            distance_from(((name, own.file.of_step(UPDATED, name, step)) for name in own.start), answer, step)
            for step in range(own.file.steps)
        ]
        products = cpu_error.products_on(context.model, context.device)
        evidence |= known_figures(answer, products)
    evidence |= {name: finite(values) for name, values in zip(FIGURES, (own.losses, own.norms, distances), strict=True)}
    same = bool(distances) and not any(distances)
    context.record.fact(
        STAGE,
        WHOLE_MODEL,
        SPECS[STAGE].whole,
        status="equal" if same else "within",
        evidence=evidence,
        reason=answer if isinstance(answer, str) else None,
    )
