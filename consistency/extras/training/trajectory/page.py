"""The curves of trainings that each device did alone: loss, and distance from the float64 training, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.capture.wording import some
from consistency.comparison.result import Comparison, TensorComparison
from consistency.extras.training.trajectory.findings import CURVE, first_steps
from consistency.extras.training.trajectory.spec import TRAJECTORY
from consistency.report.page.section import PageSection, numbers

MOST_LINES = 6
"""Each has a stroke of its own."""

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 26
"""Sizes of a chart and its margins, in the units of its view box."""

_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark of an axis: its place in the chart, and its label."""

    place: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure of every step, of all workers."""

    title: str
    spoken: str
    lines: tuple[tuple[str, ...], ...]  # of each worker, the points of its unbroken stretches, as SVG writes them
    exact: tuple[str, ...]  # the same of the float64 training; empty where that is the figure's zero
    band: str  # the outline of what trainings with noise have; empty where there were none
    # of each worker, the point at which it leaves the float64 trajectory, or None
    left_at: tuple[tuple[float, float] | None, ...]
    across: tuple[Tick, ...]
    upward: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainings:
    """All trainings of a run."""

    labels: tuple[str, ...]  # of the workers, those with the same figures together
    charts: tuple[Chart, ...]
    # step, loss and distance of each, the loss in float64, and the distances of trainings with noise
    rows: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...]  # why a worker has no distance
    left_out: int  # lines for which there is no room


def trainings(tensors: Sequence[TensorComparison]) -> Trainings | None:
    """Return the curves of a run, None where no device trained alone."""
    found = [row for t in tensors if t.stage == TRAJECTORY and t.tensor == CURVE for row in t.outcomes]
    found = [row for row in found if _is_known(row.evidence, "loss")]
    if not found:
        return None
    left = {worker: place.step for worker, place in first_steps(tensors).items()}
    found.sort(key=lambda row: not any(worker in left for worker in row.workers))
    shown = found[:MOST_LINES]
    curves = [row.evidence for row in shown]
    steps = max(len(numbers(curve, "loss")) for curve in curves)
    at = [next((left[worker] for worker in row.workers if worker in left), None) for row in shown]
    charts = [_chart("Loss", curves, "loss", steps, at, exact="float64_loss")]
    if any(_is_known(curve, "distance") for curve in curves):
        charts.append(_chart("Distance of the adapter from float64", curves, "distance", steps, at, logarithmic=True))
    return Trainings(
        labels=tuple(
            some(row.workers, 2) + ("" if step is None else f", leaves at step {step}")
            for row, step in zip(shown, at, strict=True)
        ),
        charts=tuple(charts),
        rows=tuple(_row(curves, step) for step in range(steps)),
        reasons=tuple(dict.fromkeys(row.reason for row in found if row.reason)),
        left_out=len(found) - len(shown),
    )


def _is_known(curve: Mapping[str, Any], figure: str) -> bool:
    return any(value is not None for value in numbers(curve, figure))


def _chart(
    title: str,
    curves: Sequence[Mapping[str, Any]],
    figure: str,
    steps: int,
    left_at: Sequence[int | None],
    *,
    exact: str = "",
    logarithmic: bool = False,
) -> Chart:
    lines = [numbers(curve, figure) for curve in curves]
    known = numbers(curves[0], exact) if exact else []
    least, most = (numbers(curves[0], f"noise_{which}_{figure}") for which in ("least", "most"))
    every = [value for values in (*lines, known, least, most) for value in values if value is not None]
    scale = _Scale(every, logarithmic=logarithmic)

    def across(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step / (steps - 1) if steps > 1 else 0.5)

    def stretches(values: Sequence[float | None]) -> tuple[str, ...]:
        found: list[list[str]] = [[]]
        for step, value in enumerate(values):
            place = None if value is None else scale.place(value)
            if place is None:
                found.append([])
            else:
                found[-1].append(f"{across(step):.1f},{place:.1f}")
        return tuple(" ".join(points * 2 if len(points) == 1 else points) for points in found if points)

    def point(values: Sequence[float | None], step: int | None) -> tuple[float, float] | None:
        value = None if step is None or step > len(values) else values[step - 1]
        place = None if value is None else scale.place(value)
        return None if place is None or step is None else (across(step - 1), place)

    outline = [*stretches(most)[:1], *(" ".join(reversed(part.split())) for part in stretches(least)[:1])]
    by = max(1, math.ceil(steps / 10))
    return Chart(
        title=title,
        spoken=f"{title} of {len(lines)} trainings by step, from {_short(min(every))} to {_short(max(every))}",
        lines=tuple(map(stretches, lines)),
        exact=stretches(known),
        band=" ".join(outline) if len(outline) == 2 else "",
        left_at=tuple(point(values, step) for values, step in zip(lines, left_at, strict=True)),
        across=tuple(Tick(place=across(step), label=str(step + 1)) for step in range(steps) if (step + 1) % by == 0),
        upward=tuple(scale.ticks()),
    )


class _Scale:
    """Heights in a chart, linear or logarithmic; what is not above zero has none in a logarithmic one."""

    def __init__(self, values: Sequence[float], *, logarithmic: bool) -> None:
        self._logarithmic = logarithmic
        seen = [self._of(value) for value in values if not logarithmic or value > 0] or [0.0]
        self._low, self._high = min(seen), max(seen)
        if logarithmic:
            self._low, self._high = math.floor(self._low), math.ceil(self._high)
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5

    def _of(self, value: float) -> float:
        return math.log10(value) if self._logarithmic else value

    def place(self, value: float) -> float | None:
        if self._logarithmic and value <= 0:
            return None
        share = (self._of(value) - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> Iterable[Tick]:
        if self._logarithmic and self._high - self._low >= 1:
            by = max(1, math.ceil((self._high - self._low) / _TICKS))
            values = [10.0**power for power in range(math.ceil(self._low), math.floor(self._high) + 1, by)]
        else:
            values = [self._low + (self._high - self._low) * part / (_TICKS - 1) for part in range(_TICKS)]
            values = [10.0**value for value in values] if self._logarithmic else values
        for value in values:
            place = self.place(value)
            if place is not None:
                yield Tick(place=place, label=_short(value))


def _row(curves: Sequence[Mapping[str, Any]], step: int) -> tuple[str, ...]:
    def at(curve: Mapping[str, Any], figure: str) -> str:
        values = numbers(curve, figure)
        return _short(values[step]) if step < len(values) else "–"

    own = [at(curve, figure) for curve in curves for figure in ("loss", "distance")]
    noise = [at(curves[0], f"noise_{which}_distance") for which in ("least", "most")]
    return (str(step + 1), *own, at(curves[0], "float64_loss"), " to ".join(noise))


def _short(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _values(comparison: Comparison) -> dict[str, Any]:
    found = trainings(comparison.tensors)
    size = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT}
    return {} if found is None else {"trainings": found, "chart_size": size}


SECTION = PageSection(package=__package__, template="trainings.html", values=_values)
