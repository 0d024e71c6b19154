"""Findings of trainings: the first step at which a device leaves the float64 trajectory, or how near it stays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from consistency.capture.names import GRADIENT, UPDATED
from consistency.capture.wording import counted, some
from consistency.case.stages import MOVES_WEIGHTS
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.findings.next_command import run_again
from consistency.comparison.result import BAD, Finding, Outcome, TensorComparison
from consistency.extras.training.kinds import KEPT_TRAJECTORY, LEFT_TRAJECTORY
from consistency.extras.training.trajectory.spec import STEPWISE, TRAJECTORY

STAGE = TRAJECTORY
CURVE, FORWARD = "curve", "forward"
"""Tensors of this stage's rows: of the fact with the figures of every step, and of hidden states and outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongRow:
    """A row that is outside its tolerance; of a worker's wrong rows, the one with the smallest `key` is the first."""

    step: int
    """Step of the training, from 1."""
    phase: int
    """Phase of the step: 0 for the forward pass, 1 for the backward pass, 2 for the optimizer."""
    number: int
    """Position of the row within its phase, in the order in which the phase computes."""
    tensor: TensorComparison
    row: Outcome

    @property
    def key(self) -> tuple[int, int, int]:
        return self.step, self.phase, self.number

    @property
    def where(self) -> str:
        parameter, _, kind = self.tensor.tensor.rpartition(".")
        if kind == GRADIENT:
            return f"the gradient of {parameter} of {self.tensor.layer}"
        if kind == UPDATED:
            return f"{parameter} of {self.tensor.layer} after the optimizer's step"
        return f"{self.tensor.layer} of the forward pass"


def without_trajectories(_: ComparisonEvidence, tensors: Sequence[TensorComparison]) -> list[TensorComparison]:
    """Return tensors without the rows of trainings, but for workers with wrong weights, which explain their rows."""
    explained_workers = _workers_with_wrong_weights(tensors)
    remaining = []
    for tensor in tensors:
        if tensor.stage != STAGE:
            remaining.append(tensor)
        elif (explained := _of_workers(tensor, explained_workers)) is not None:
            remaining.append(explained)
    return remaining


def _of_workers(tensor: TensorComparison, workers: Collection[str]) -> TensorComparison | None:
    """Return a tensor with the outcomes of some workers alone, None where it has none of theirs."""
    outcomes = []
    for outcome in tensor.outcomes:
        if names := _among(outcome.workers, workers):
            outcomes.append(outcome.of(names))
    if not outcomes:
        return None
    classes = [_among(names, workers) for names in tensor.classes]
    return msgspec.structs.replace(
        tensor,
        outcomes=tuple(outcomes),
        classes=tuple(names for names in classes if names),
        workers=_among(tensor.workers, workers),
    )


def _among(names: Iterable[str], workers: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in workers)


def _workers_with_wrong_weights(tensors: Sequence[TensorComparison]) -> set[str]:
    workers: set[str] = set()
    for tensor in tensors:
        if tensor.stage in MOVES_WEIGHTS and tensor.is_wrong:
            for outcome in tensor.outcomes:
                if outcome.status in BAD:
                    workers.update(outcome.workers)
    return workers


def find_trajectories(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report where devices leave the float64 trajectory: step, layer and tensor; else how near to it all stay."""
    tensors = [tensor for tensor in evidence.tensors if tensor.stage == STAGE]
    curves = _curves(tensors)
    # wrong weights have a finding of their own, and every training with them is wrong
    explained_workers = _workers_with_wrong_weights(evidence.tensors)
    wrong_rows = {worker: rows for worker, rows in _wrong_rows(tensors).items() if worker not in explained_workers}
    # workers that leave in the same place share a finding
    workers_by_place: dict[tuple[int, str], list[str]] = {}
    for worker, rows in wrong_rows.items():
        first = _first(rows)
        workers_by_place.setdefault((first.step, first.tensor.name), []).append(worker)
    for workers in workers_by_place.values():
        yield _departure(workers, wrong_rows, curves, next_step=run_again(evidence, workers))
    unhealthy = explained_workers | wrong_rows.keys()
    healthy_curves = {worker: curve for worker, curve in curves.items() if worker not in unhealthy}
    if healthy_curves:
        yield _nearness(tensors, healthy_curves)


def _curves(tensors: Sequence[TensorComparison]) -> dict[str, Mapping[str, Any]]:
    """Return the figures of every step, by name, for each worker."""
    curves: dict[str, Mapping[str, Any]] = {}
    for tensor in tensors:
        if tensor.tensor == CURVE:
            for worker, row in tensor.by_worker():
                if row.status in ("equal", "within"):
                    curves[worker] = row.evidence
    return curves


def first_steps(tensors: Sequence[TensorComparison]) -> dict[str, WrongRow]:
    """Return the first wrong row of each training that has one, by worker."""
    return {worker: _first(rows) for worker, rows in _wrong_rows(tensors).items()}


def _first(rows: Iterable[WrongRow]) -> WrongRow:
    return min(rows, key=lambda row: row.key)


def _wrong_rows(tensors: Sequence[TensorComparison]) -> dict[str, list[WrongRow]]:
    """Return the rows outside their tolerance, by worker."""
    rows: dict[str, list[WrongRow]] = {}
    for number, tensor in enumerate(tensor for tensor in tensors if tensor.stage == STAGE):
        for worker, row in tensor.by_worker():
            # a row without a step has no place in the order of a training
            if row.status == "outside" and isinstance(row.evidence.get("step"), int):
                rows.setdefault(worker, []).append(_wrong_row(number, tensor, row))
    return rows


def _wrong_row(number: int, tensor: TensorComparison, row: Outcome) -> WrongRow:
    kind = tensor.tensor.rpartition(".")[2]
    phase = {FORWARD: 0, GRADIENT: 1, UPDATED: 2}.get(kind, 0)
    # a backward pass begins with the last layer
    number_in_phase = -number if phase == 1 else number
    return WrongRow(step=int(row.evidence["step"]), phase=phase, number=number_in_phase, tensor=tensor, row=row)


def _departure(
    workers: Sequence[str],
    wrong_rows: Mapping[str, Sequence[WrongRow]],
    curves: Mapping[str, Mapping[str, Any]],
    *,
    next_step: str | None,
) -> Finding:
    """Report the step and the tensor at which some workers leave the float64 trajectory."""
    rows = list(itertools.chain.from_iterable(wrong_rows[worker] for worker in workers))
    first = _first(rows)
    opening = f"{STAGE} · {some(workers)} · leaves the float64 trajectory"
    message = f"{opening} at step {first.step}, in {first.where}"
    if first.row.ratio is not None:
        message += f": {float(first.row.ratio):.3g}× tolerance"
    # the curve of one worker is an example: all left in the same place
    curve = curves.get(workers[0], {})
    loss, exact_loss = (_figure_at(curve, name, first.step) for name in ("loss", "float64_loss"))
    if loss is not None and exact_loss is not None:
        message += f"; loss {loss:.4g} there, {exact_loss:.4g} in float64"
    if first.step > 1:
        steps_before = {2: "step 1 is", 3: "steps 1 and 2 are"}.get(first.step, f"steps 1 to {first.step - 1} are")
        message += f"; {steps_before} within tolerance"
    return Finding(
        kind=LEFT_TRAJECTORY,
        severity="error",
        message=message,
        general=f"{opening} in {first.where}",
        workers=tuple(workers),
        tensors=tuple(dict.fromkeys(row.tensor.name for row in rows)),
        next=next_step,
    )


def _figure_at(curve: Mapping[str, Any], figure: str, step: int) -> float | None:
    """Return a figure of a step; None where it is no finite number, for a capture may come from a stranger."""
    values = curve.get(figure)
    if not isinstance(values, (list, tuple)) or not 0 < step <= len(values):
        return None
    value = values[step - 1]
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _nearness(tensors: Sequence[TensorComparison], curves: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Report how far healthy devices are from float64 after the last step, and how far rounding alone may be."""
    steps = max(_step_count(curve) for curve in curves.values())
    verdict = f"{_judged_steps(tensors)} what rounding makes"
    message = f"{STAGE} · {some(list(curves))} · {counted(steps, 'step')}: {verdict}"
    distances = _last_figures(curves, "distance", steps)
    exact_losses = _last_figures(curves, "float64_loss", steps)
    if distances and exact_losses:
        message += f"; after the last one the adapter is {_range_text(distances, '.2g')} from the float64 trajectory"
        least = _last_figures(curves, "noise_least_distance", steps)
        most = _last_figures(curves, "noise_most_distance", steps)
        if least and most:
            message += f" (noise alone: {_range_text([min(least), max(most)], '.2g')})"
        losses = _last_figures(curves, "loss", steps)
        message += f", loss {_range_text(losses, '.4g')} against {_range_text(exact_losses, '.4g')}"
    return Finding(
        kind=KEPT_TRAJECTORY,
        severity="note",
        message=message,
        general=f"{STAGE} · {some(list(curves))} · {verdict}",
        workers=tuple(curves),
        tensors=tuple(tensor.name for tensor in tensors if tensor.tensor == CURVE),
    )


def _step_count(curve: Mapping[str, Any]) -> int:
    steps = curve.get("steps")
    return steps if isinstance(steps, int) else 0


def _judged_steps(tensors: Sequence[TensorComparison]) -> str:
    """Return the steps that were judged, as the subject of a sentence with its verb."""
    if not any(_has_judged_pass(tensor) for tensor in tensors):
        return "every step of the optimizer is"
    has_left_out_steps = any(tensor.tensor == STEPWISE for tensor in tensors)
    return "every step that was judged is" if has_left_out_steps else "every step is"


def _has_judged_pass(tensor: TensorComparison) -> bool:
    """Report whether a tensor is of a forward or a backward pass, and has a row that is judged as right."""
    is_of_a_pass = tensor.tensor.rpartition(".")[2] in (FORWARD, GRADIENT)
    return is_of_a_pass and any(row.status in ("equal", "within") for row in tensor.outcomes)


def _last_figures(curves: Mapping[str, Mapping[str, Any]], figure: str, steps: int) -> list[float]:
    """Return a figure after the last step, of each worker that has it."""
    values = [_figure_at(curve, figure, steps) for curve in curves.values()]
    return [value for value in values if value is not None]


def _range_text(values: Sequence[float], spec: str) -> str:
    least, most = format(min(values), spec), format(max(values), spec)
    return least if least == most else f"{least} to {most}"


TRAJECTORIES = Finder(
    name="trajectories", phase=Phase.STAGES, position=4, find=find_trajectories, without_own=without_trajectories
)
