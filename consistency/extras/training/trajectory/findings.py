"""Training: the first step at which a device's own leaves the float64 one, or how near it stays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from consistency.extras.training.trajectory.spec import TRAJECTORY

STAGE = TRAJECTORY
CURVE, FORWARD, STEPWISE = "curve", "forward", "steps"
"""Tensors of this stage's rows: of the fact with the figures of every step, of hidden states and outputs, and of the
reason why steps are not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongRow:
    """A row outside: the step, what a step does first, and where that begins; the least one is where it left."""

    step: int
    phase: int
    number: int
    tensor: TensorComparison
    row: Outcome

    @property
    def key(self) -> tuple[int, int, int]:
        return self.step, self.phase, self.number

    @property
    def where(self) -> str:
        part, _, kind = self.tensor.tensor.rpartition(".")
        if kind == GRADIENT:
            return f"the gradient of {part} of {self.tensor.layer}"
        if kind == UPDATED:
            return f"{part} of {self.tensor.layer} after the optimizer's step"
        return f"{self.tensor.layer} of the forward pass"


def without_trajectories(_: ComparisonEvidence, tensors: Sequence[TensorComparison]) -> list[TensorComparison]:
    """Return tensors without the rows of trainings but those of workers with wrong weights, which explain them."""
    wrong = _with_wrong_weights(tensors)
    found = []
    for tensor in tensors:
        if tensor.stage != STAGE:
            found.append(tensor)
            continue
        kept = tuple(
            row.of(left) for row in tensor.outcomes if (left := tuple(name for name in row.workers if name in wrong))
        )
        if kept:
            workers = tuple(name for name in tensor.workers if name in wrong)
            classes = tuple(left for names in tensor.classes if (left := tuple(n for n in names if n in wrong)))
            found.append(msgspec.structs.replace(tensor, outcomes=kept, classes=classes, workers=workers))
    return found


def _with_wrong_weights(tensors: Sequence[TensorComparison]) -> set[str]:
    moved = (tensor for tensor in tensors if tensor.stage in MOVES_WEIGHTS and tensor.is_wrong)
    return {worker for tensor in moved for row in tensor.outcomes if row.status in BAD for worker in row.workers}


def find_trajectories(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report where devices leave the float64 trajectory: step, layer, and part of it; else how near to it all stay."""
    of_stage = [tensor for tensor in evidence.tensors if tensor.stage == STAGE]
    curves = {
        worker: row.evidence
        for tensor in of_stage
        if tensor.tensor == CURVE
        for worker, row in tensor.by_worker()
        if row.status in ("equal", "within")
    }
    explained = _with_wrong_weights(evidence.tensors)
    wrong = {worker: places for worker, places in _outside(of_stage).items() if worker not in explained}
    same: dict[tuple[int, str], list[str]] = {}
    for worker, places in wrong.items():
        first = min(places, key=lambda place: place.key)
        same.setdefault((first.step, first.tensor.name), []).append(worker)
    for workers in same.values():
        yield _left(workers, wrong, curves, next_step=run_again(evidence, workers))
    healthy = {worker: curve for worker, curve in curves.items() if worker not in wrong and worker not in explained}
    if healthy:
        yield _kept_to_it(of_stage, healthy)


def first_steps(tensors: Sequence[TensorComparison]) -> dict[str, WrongRow]:
    """Return the first place at which a training is outside, by worker."""
    return {worker: min(places, key=lambda place: place.key) for worker, places in _outside(tensors).items()}


def _outside(tensors: Sequence[TensorComparison]) -> dict[str, list[WrongRow]]:
    found: dict[str, list[WrongRow]] = {}
    for number, tensor in enumerate(tensor for tensor in tensors if tensor.stage == STAGE):
        for worker, row in tensor.by_worker():
            if row.status == "outside" and isinstance(row.evidence.get("step"), int):
                found.setdefault(worker, []).append(_place(number, tensor, row))
    return found


def _place(number: int, tensor: TensorComparison, row: Outcome) -> WrongRow:
    kind = tensor.tensor.rpartition(".")[2]
    phase = {FORWARD: 0, GRADIENT: 1, UPDATED: 2}.get(kind, 0)
    # a backward pass begins with the last layer
    return WrongRow(
        step=int(row.evidence["step"]), phase=phase, number=-number if phase == 1 else number, tensor=tensor, row=row
    )


def _left(
    workers: Sequence[str],
    wrong: Mapping[str, Sequence[WrongRow]],
    curves: Mapping[str, Mapping[str, Any]],
    *,
    next_step: str | None,
) -> Finding:
    first = min((place for worker in workers for place in wrong[worker]), key=lambda place: place.key)
    opening = f"{STAGE} · {some(workers)} · leaves the float64 trajectory"
    parts = [f"at step {first.step}, in {first.where}"]
    ratio = "" if first.row.ratio is None else f": {float(first.row.ratio):.3g}× tolerance"
    own, exact = (_at(curves.get(workers[0], {}), name, first.step) for name in ("loss", "float64_loss"))
    if own is not None and exact is not None:
        parts.append(f"loss {own:.4g} there, {exact:.4g} in float64")
    if first.step > 1:
        before = {2: "step 1 is", 3: "steps 1 and 2 are"}.get(first.step, f"steps 1 to {first.step - 1} are")
        parts.append(f"{before} within tolerance")
    return Finding(
        kind=LEFT_TRAJECTORY,
        severity="error",
        message=f"{opening} {parts[0]}{ratio}{''.join(f'; {part}' for part in parts[1:])}",
        general=f"{opening} in {first.where}",
        workers=tuple(workers),
        tensors=tuple(dict.fromkeys(place.tensor.name for worker in workers for place in wrong[worker])),
        next=next_step,
    )


def _at(curve: Mapping[str, Any], figure: str, step: int) -> float | None:
    """Return a figure of a step; None where it is no finite number, for a capture may come from a stranger."""
    values = curve.get(figure)
    value = values[step - 1] if isinstance(values, (list, tuple)) and 0 < step <= len(values) else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _kept_to_it(tensors: Sequence[TensorComparison], curves: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Say how far healthy devices are from float64 after the last step, and how far rounding alone may be."""
    judged = any(
        row.status in ("equal", "within") and kind in (FORWARD, GRADIENT)
        for tensor in tensors
        for kind in [tensor.tensor.rpartition(".")[2]]
        for row in tensor.outcomes
    )
    steps = max(steps if isinstance(steps := curve.get("steps"), int) else 0 for curve in curves.values())
    left_out = any(tensor.tensor == STEPWISE for tensor in tensors)
    each = "every step that was judged is" if left_out else "every step is"
    each = f"{each if judged else 'every step of the optimizer is'} what rounding makes"
    ends = {
        name: [value for curve in curves.values() if (value := _at(curve, name, steps)) is not None]
        for name in ("loss", "distance", "float64_loss", "noise_least_distance", "noise_most_distance")
    }
    text = f"{counted(steps, 'step')}: {each}"
    if ends["distance"] and ends["float64_loss"]:
        text += f"; after the last one the adapter is {_range(ends['distance'], '.2g')} from the float64 trajectory"
        if ends["noise_least_distance"] and ends["noise_most_distance"]:
            least, most = min(ends["noise_least_distance"]), max(ends["noise_most_distance"])
            text += f" (noise alone: {_range([least, most], '.2g')})"
        text += f", loss {_range(ends['loss'], '.4g')} against {_range(ends['float64_loss'], '.4g')}"
    return Finding(
        kind=KEPT_TRAJECTORY,
        severity="note",
        message=f"{STAGE} · {some(list(curves))} · {text}",
        general=f"{STAGE} · {some(list(curves))} · {each}",
        workers=tuple(curves),
        tensors=tuple(tensor.name for tensor in tensors if tensor.tensor == CURVE),
    )


def _range(values: Sequence[float], spec: str) -> str:
    least, most = format(min(values), spec), format(max(values), spec)
    return least if least == most else f"{least} to {most}"


TRAJECTORIES = Finder(
    name="trajectories", phase=Phase.STAGES, position=4, find=find_trajectories, without_own=without_trajectories
)
