"""Judge each step of a training from the bytes that the device itself had before it.

A trajectory as a whole cannot be judged: near a gradient of zero the optimizer goes either way, so healthy trainings
part by any multiple of what rounding makes. One step can: its hidden states and gradients are compared with a float64
pass at the device's own parameters, by the `relative` rule and the error that passes with noise make at these
parameters. Nothing that an earlier step did is held against a later one, so the first step outside is where it began.

Where a model decides (routers, ReLU), rounding may turn a decision, and what follows jumps. So passes with noise decide
as the device did, and float64 as far as rounding explains it (`decisions.track`); what it does not explain has a row.
"""

from __future__ import annotations

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
from consistency.worker.decisions.places import Places
from consistency.worker.decisions.track import Flip
from consistency.worker.model.float64_reference import Reference, Tables
from consistency.worker.model.running import is_of_the_model
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.precision import products_of
from consistency.worker.stages.context import Context
from consistency.worker.stages.decision_flips import record_flips
from consistency.worker.stages.relative_rule import record_relative
from consistency.worker.stages.trajectory.device_decisions import PASS, DeviceDecisions
from consistency.worker.stages.trajectory.passes import TrainingPass, TrainingPasses, Watches
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
    decisions : DeviceDecisions

    Attributes
    ----------
    left_out : int
        Steps in which the device decides by other operations than float64, as kernels of its own may.
    """

    def __init__(
        self,
        context: Context,
        twin: TrainingPasses,
        file: StepFile,
        start: Tensors,
        *,
        states: Sequence[TensorFile],
        decisions: DeviceDecisions,
    ) -> None:
        self.left_out = 0
        self._decisions = decisions
        self._flips: tuple[int, list[Flip]] = (0, [])
        self._context = context
        self._twin = twin
        self._file = file
        self._start = start
        self._states = states
        self._products = cpu_error.products_in(context.model, products_of(context.device))
        self._title = cpu_error.name_of(self._products)
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
                found = self._of_one_track(step)
            except Exception as error:  # code that insists on its own dtype
                if not is_of_the_model(error, self._twin.model):
                    raise
                return first_line(error)
            if found is None:
                self.left_out += 1
            else:
                self._check(step, *found)
        return ""

    def _of_one_track(self, step: int) -> tuple[TrainingPass, list[TrainingPass]] | None:
        """Return a pass in float64 and those with noise, all with the same decisions; None where that cannot be."""
        track = self._decisions.of(step)
        if track is None:
            unexpected: list[str] = []
            # watching takes some 30 µs per operation: the first step shows whether there is something to watch
            watch = None if step else lambda decision: unexpected.append(decision.name)
            exact = self._twin.take(step, exact=True, watches=lambda: watch)
            return None if unexpected else (exact, self._draw(step, lambda: None))
        track.places = Places(self._twin.model)
        drawn = self._draw(step, lambda: track.other(PASS, self._title))
        exact = self._twin.take(step, exact=True, watches=lambda: track.exact(PASS), places=track.places)
        if not track.was_complete(PASS):
            return None
        if track.flips:
            self._flips = self._flips if self._flips[1] else (step, track.flips)
            drawn = self._draw(step, lambda: track.again(PASS))
        track.remove()
        return exact, drawn

    def _draw(self, step: int, watches: Watches) -> list[TrainingPass]:
        file = self._states[step]
        states = {name: own for name in file.written if (own := file.read(name)) is not None}
        gradients = {name: self._file.of_step(AVERAGED, name, step) for name in self._start}

        def independent(drawn: TrainingPass) -> dict[str, int]:
            names = states.keys() & drawn.states.keys()
            of_states = {name: independent_rows(drawn.states[name], mapped(states[name])) for name in names}
            return of_states | {
                f"gradient of {name}": independent_lines(drawn.gradients[name][None], own[None])
                for name, own in gradients.items()
            }

        wanted = cpu_error.passes_for(self._twin.multiplications)
        wanted = range(wanted.start, min(wanted.stop, MOST_DRAWN + 1))
        return cpu_error.draw(self._products, wanted, lambda: self._twin.take(step, watches=watches), independent)

    def _check(self, step: int, exact: TrainingPass, drawn: Sequence[TrainingPass]) -> None:
        states = {name: s for name in exact.states if (s := self._states[step].read(name)) is not None}
        for name, actual in states.items():
            of_name = [one.states[name] for one in drawn]
            self._keep(FORWARD, name, step, actual, exact.states[name], of_name, independent_rows)
        for name in self._start:
            own = self._file.of_step(AVERAGED, name, step)
            of_name = [one.gradients[name][None] for one in drawn]
            self._keep(GRADIENT, name, step, own[None], exact.gradients[name][None], of_name, independent_lines)

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
        """Record one row for each hidden state, output and gradient, and the first decisions beyond rounding."""
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
                errors={self._title: {name: kept.error}}, failures={}, names=(), computed_by=self._twin.computed_by
            )
            record_relative(
                self._context, STAGE, layer, tensor, actual=actual, digests=[digest(actual)],
                reference=Reference(path=self._exact.path, tables=tables, made={name: exact}), name=name,
                mode=FORWARD, computed_by=computed_by, more={"step": kept.step + 1},
            )  # fmt: skip
        step, flips = self._flips
        record_flips(self._context, STAGE, flips, more={"step": step + 1})

    def _place(self, kind: str, name: str) -> tuple[str, str]:
        if kind == FORWARD:
            return name, FORWARD
        layer, tensor = adapter_place(self._context.expected[name][0])
        return layer, f"{tensor}.{GRADIENT}"
