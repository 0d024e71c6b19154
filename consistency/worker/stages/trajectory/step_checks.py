"""Judge each step of a training from the bytes that the device itself had before it.

A trajectory as a whole cannot be judged: near a gradient of zero the optimizer goes either way, so healthy trainings
part by any multiple of what rounding makes. One step can: its hidden states and gradients are compared with a float64
pass at the device's own parameters, by the `relative` rule and the error that passes with noise make at these
parameters. Nothing that an earlier step did is held against a later one, so the first step outside is where it began.

Where a model decides (routers, ReLU), rounding may turn a decision, and what follows jumps. A step in which the device
decided otherwise than float64 is left out, and so are passes with noise that did.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from consistency.capture.names import GRADIENT, adapter_place
from consistency.case.stages import Stage
from consistency.errors import first_line
from consistency.numerics.digest import digest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.file_tensor import Readable, mapped
from consistency.numerics.independent_errors import independent_lines, independent_rows
from consistency.numerics.rules import RoundingError, judge_relative, passes
from consistency.worker import cpu_error
from consistency.worker.decisions.replay import Made
from consistency.worker.model.float64_reference import Reference, Tables
from consistency.worker.model.running import is_of_the_model
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.precision import products_of
from consistency.worker.stages.context import Context
from consistency.worker.stages.relative_rule import record_relative
from consistency.worker.stages.trajectory.passes import TrainingPass, TrainingPasses
from consistency.worker.training.backward import Tensors
from consistency.worker.training.steps import AVERAGED, UPDATED, StepFile

STAGE = Stage.TRAJECTORY
FORWARD = "forward"
"""Tensor of the rows of hidden states and outputs."""

MOST_DRAWN = 4
"""Passes with noise at each step, at most.

Few of them know less of what rounding makes, which widens the factor that is allowed (`rules.error_factor`): the chance
of a false alarm stays the same. Every step draws at its own parameters.
"""

Samples = Callable[[Readable, Readable], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The step at which a tensor is recorded."""

    step: int
    ratio: float
    actual: Readable
    error: RoundingError
    exact: torch.Tensor | None = None


class StepChecks:
    """Finds, for every hidden state and gradient, the first step that is outside, or the one nearest to it.

    Parameters
    ----------
    twin : TrainingPasses
        Of the same model on the CPU.
    start : dict
        The parameters before the first step, on the CPU.
    states : sequence of TensorFile
        Hidden states and outputs of each step.
    made : Made
        The device's decisions, by the number of the step.

    Attributes
    ----------
    left_out : int
        Steps in which the device decided otherwise than float64.
    """

    def __init__(
        self,
        context: Context,
        twin: TrainingPasses,
        file: StepFile,
        start: Tensors,
        *,
        states: Sequence[TensorFile],
        made: Made,
    ) -> None:
        self.left_out = 0
        self._made, self._of_twin = made, Made()
        self._context = context
        self._twin = twin
        self._file = file
        self._start = start
        self._states = states
        self._products = cpu_error.products_in(context.model, products_of(context.device))
        self._kept: dict[tuple[str, str], _Kept] = {}
        layout = {name: (torch.float64, tuple(tensor.shape)) for name, tensor in start.items()}
        self._exact = TensorFile(context.scratch / f"trajectory-exact-{os.getpid()}.safetensors", layout)

    def close(self) -> None:
        self._exact.close(remove=True)

    def check(self) -> str:
        """Compute every step again in float64 and with noise; return why that is not possible."""
        steps = self._file.steps
        for step in range(steps):
            self._context.events.step(f"step {step + 1}, float64", step, steps)
            before = {n: self._file.of_step(UPDATED, n, step - 1) for n in self._start} if step else self._start
            self._twin.begin(before)
            try:
                exact = self._twin.take(step, exact=True, watch=self._of_twin.watch(str(step)))
            except Exception as error:  # code that insists on its own dtype
                if not is_of_the_model(error, self._twin.model):
                    raise
                return first_line(error)
            if not (self._made.is_as(self._of_twin, str(step), str(step)) and self._check(step, exact)):
                self.left_out += 1
        return ""

    def _check(self, step: int, exact: TrainingPass) -> bool:
        """Judge a step; return False where no pass with noise decides as the device did."""
        states = {name: s for name in exact.states if (s := self._states[step].read(name)) is not None}
        gradients = {name: self._file.of_step(AVERAGED, name, step) for name in self._start}

        def independent(drawn: TrainingPass) -> int:
            counts = [independent_rows(drawn.states[name], mapped(own)) for name, own in states.items()]
            counts += [independent_lines(drawn.gradients[name][None], own[None]) for name, own in gradients.items()]
            return min(counts, default=1)

        wanted = cpu_error.passes_for(self._twin.multiplications)
        wanted = range(wanted.start, min(wanted.stop, MOST_DRAWN + 1))
        numbers = itertools.count()

        def noisy() -> TrainingPass:
            return self._twin.take(step, watch=self._of_twin.watch(f"{step}, noise {next(numbers)}"))

        every = cpu_error.draw(self._products, wanted, noisy, independent)
        drawn = [
            one
            for number, one in enumerate(every)
            if self._made.is_as(self._of_twin, str(step), f"{step}, noise {number}")
        ]
        if not drawn:
            return False
        for name, actual in states.items():
            of_name = [one.states[name] for one in drawn]
            self._keep(FORWARD, name, step, actual, exact.states[name], of_name, independent_rows)
        for name, own in gradients.items():
            of_name = [one.gradients[name][None] for one in drawn]
            self._keep(GRADIENT, name, step, own[None], exact.gradients[name][None], of_name, independent_lines)
        return True

    def _keep(
        self, kind: str, name: str, step: int, actual: Readable, exact: torch.Tensor, drawn: Sequence[torch.Tensor],
        samples: Samples,
    ) -> None:  # fmt: skip
        """Keep a step in the place of an earlier one that was within, if it is outside or nearer to that."""
        kept = self._kept.get((kind, name))
        if (kept is not None and not passes(kept.ratio)) or actual.shape != exact.shape or 0 in exact.shape:
            return
        if actual.dtype not in UNIT_ROUNDOFF:
            return
        exact = exact.to(torch.float64)
        tolerance = self._context.record.tolerance(
            stage=STAGE, layer=self._place(kind, name)[0], dtype=actual.dtype
        )  # fmt: skip
        error = cpu_error.rounding_error(drawn, exact, samples)
        found = measure_against_exact(actual, exact, tolerance)
        ratio = judge_relative(found, name_of(actual.dtype), error).ratio
        if tolerance is not None:
            ratio = float(found.ratio or 0)
        if kept is not None and ratio <= kept.ratio:
            return
        if kind == GRADIENT:
            self._exact.write(name, 0, exact[0].contiguous())
        self._kept[kind, name] = _Kept(
            step=step, ratio=ratio, actual=actual, error=error, exact=None if kind == GRADIENT else exact
        )

    def record(self, computed_by: str) -> None:
        """Record one row for each hidden state, output and gradient."""
        title = cpu_error.name_of(self._products)
        for (kind, name), kept in self._kept.items():
            layer, tensor = self._place(kind, name)
            if not self._context.record.wants(STAGE, layer):
                continue
            exact, actual = kept.exact, mapped(kept.actual)
            if kind == GRADIENT:
                of_file = self._exact.read(name)
                assert of_file is not None
                exact, actual = mapped(of_file), actual[0]
            assert exact is not None
            tables = Tables(
                errors={title: {name: kept.error}}, failures={}, names=(), computed_by=self._twin.computed_by
            )
            record_relative(
                self._context, STAGE, layer, tensor, actual=actual, digests=[digest(actual)],
                reference=Reference(path=self._exact.path, tables=tables, made={name: exact}), name=name,
                exact_name=name, mode=FORWARD, computed_by=computed_by, more={"step": kept.step + 1},
            )  # fmt: skip

    def _place(self, kind: str, name: str) -> tuple[str, str]:
        if kind == FORWARD:
            return name, FORWARD
        layer, tensor = adapter_place(self._context.expected[name][0])
        return layer, f"{tensor}.{GRADIENT}"
