"""The curves of trainings that each device did alone: loss, and distance from the float64 training, step by step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.capture.wording import some
from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.extras.training.trajectory.findings import CURVE, first_steps
from consistency.extras.training.trajectory.spec import TRAJECTORY
from consistency.report.page.section import PageSection, numbers

MOST_LINES = 6
"""Most lines of a chart: the page's style has as many strokes."""

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 26
"""Sizes of a chart and its margins, in the units of its view box."""

_TICKS = 5
"""Ticks of the upward axis."""

_STEP_LABELS = 10
"""Steps that the axis across names at most."""

Line = Sequence[float | None]
"""A figure of every step; None where it is not known or not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark of an axis."""

    position: float
    """Distance from the left or the top edge of the chart, in the units of its view box."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of one figure, step by step, with a line for each worker."""

    title: str
    spoken: str
    """Description of the chart for readers who do not see it."""
    lines: tuple[tuple[str, ...], ...]
    """The points of each worker's unbroken stretches, as SVG writes them."""
    exact: tuple[str, ...]
    """The points of the float64 training's unbroken stretches; empty where that training is the figure's zero."""
    band: str
    """The outline of the figures of trainings with noise; empty where there were none."""
    left_at: tuple[tuple[float, float] | None, ...]
    """The point at which each worker leaves the float64 trajectory; None for a worker that stays."""
    across: tuple[Tick, ...]
    upward: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainings:
    """The charts and the table of all trainings of a run."""

    labels: tuple[str, ...]
    """Names of the lines: workers with the same figures share one."""
    charts: tuple[Chart, ...]
    rows: tuple[tuple[str, ...], ...]
    """Rows of the table: step, loss and distance of each line, loss in float64, distances of trainings with noise."""
    reasons: tuple[str, ...]
    """Reasons why a worker has no distance."""
    left_out: int
    """Number of lines for which there is no room."""


def trainings(tensors: Sequence[TensorComparison]) -> Trainings | None:
    """Return the curves of a run, None where no device trained alone."""
    outcomes = [outcome for outcome in _curve_outcomes(tensors) if _has_numbers(outcome.evidence, "loss")]
    if not outcomes:
        return None
    step_by_worker = {worker: row.step for worker, row in first_steps(tensors).items()}
    # wrong trainings come first, so that there is room for their lines
    outcomes.sort(key=lambda outcome: _first_known(step_by_worker, outcome.workers) is None)
    shown = outcomes[:MOST_LINES]
    curves = [outcome.evidence for outcome in shown]
    left_at = [_first_known(step_by_worker, outcome.workers) for outcome in shown]
    steps = max(len(numbers(curve, "loss")) for curve in curves)
    charts = [_chart("Loss", curves, "loss", steps, left_at, exact="float64_loss")]
    if any(_has_numbers(curve, "distance") for curve in curves):
        title = "Distance of the adapter from float64"
        charts.append(_chart(title, curves, "distance", steps, left_at, logarithmic=True))
    # workers may share a reason
    reasons = dict.fromkeys(outcome.reason for outcome in outcomes if outcome.reason)
    return Trainings(
        labels=tuple(map(_label, shown, left_at)),
        charts=tuple(charts),
        rows=tuple(_table_row(curves, step) for step in range(steps)),
        reasons=tuple(reasons),
        left_out=len(outcomes) - len(shown),
    )


def _curve_outcomes(tensors: Sequence[TensorComparison]) -> Iterator[Outcome]:
    for tensor in tensors:
        if tensor.stage == TRAJECTORY and tensor.tensor == CURVE:
            yield from tensor.outcomes


def _has_numbers(curve: Mapping[str, Any], figure: str) -> bool:
    return any(value is not None for value in numbers(curve, figure))


def _first_known(step_by_worker: Mapping[str, int], workers: Sequence[str]) -> int | None:
    """Return the step of the first worker that has one."""
    return next((step_by_worker[worker] for worker in workers if worker in step_by_worker), None)


def _label(outcome: Outcome, left_at: int | None) -> str:
    label = some(outcome.workers, 2)
    return label if left_at is None else f"{label}, leaves at step {left_at}"


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
    """Draw a figure of some curves.

    Parameters
    ----------
    curves : sequence of dict
        Evidence of the workers' curves, which has every figure by its name.
    left_at : sequence of (int or None)
        The step at which each worker leaves the float64 trajectory, from 1.
    exact : str
        Name of the same figure of the float64 training; empty where it has none.
    logarithmic : bool
        Whether the upward axis is logarithmic.
    """
    lines = [numbers(curve, figure) for curve in curves]
    # the float64 training is the same for all workers; the noise is that of the first one's products
    exact_line = numbers(curves[0], exact) if exact else []
    noise_least, noise_most = (numbers(curves[0], f"noise_{end}_{figure}") for end in ("least", "most"))
    all_points = itertools.chain(*lines, exact_line, noise_least, noise_most)
    values = [value for value in all_points if value is not None]
    axes = _Axes(steps, _Scale(values, logarithmic=logarithmic))
    return Chart(
        title=title,
        spoken=f"{title} of {len(lines)} trainings by step, from {_number(min(values))} to {_number(max(values))}",
        lines=tuple(map(axes.stretches, lines)),
        exact=axes.stretches(exact_line),
        band=axes.outline(noise_least, noise_most),
        left_at=tuple(map(axes.point, lines, left_at)),
        across=axes.step_ticks(),
        upward=tuple(axes.scale.ticks()),
    )


class _Scale:
    """Heights in a chart, linear or logarithmic; in a logarithmic one, values of zero and less have none."""

    def __init__(self, values: Sequence[float], *, logarithmic: bool) -> None:
        self._logarithmic = logarithmic
        drawable = [value for value in values if not logarithmic or value > 0]
        scaled = [self._scaled(value) for value in drawable] or [0.0]
        self._low, self._high = min(scaled), max(scaled)
        if logarithmic:
            self._low, self._high = math.floor(self._low), math.ceil(self._high)
        # a range of zero has no heights: equal values lie in the middle
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._logarithmic else value

    def height(self, value: float) -> float | None:
        """Return the distance of a value from the top edge of the chart, None where it has none."""
        if self._logarithmic and value <= 0:
            return None
        fraction = (self._scaled(value) - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - fraction * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> Iterable[Tick]:
        """Yield the ticks of the upward axis."""
        for value in self._tick_values():
            position = self.height(value)
            if position is not None:
                yield Tick(position=position, label=_number(value))

    def _tick_values(self) -> list[float]:
        extent = self._high - self._low
        if self._logarithmic and extent >= 1:
            stride = max(1, math.ceil(extent / _TICKS))
            return [10.0**power for power in range(math.ceil(self._low), math.floor(self._high) + 1, stride)]
        scaled = [self._low + extent * number / (_TICKS - 1) for number in range(_TICKS)]
        return [10.0**power for power in scaled] if self._logarithmic else scaled


@dataclass(frozen=True, slots=True)
class _Axes:
    """Both axes of a chart: they turn steps and values into points, as SVG writes them."""

    steps: int
    scale: _Scale

    def across(self, step: int) -> float:
        """Return the distance of a step, from 0, from the left edge of the chart; a single step is in the middle."""
        fraction = step / (self.steps - 1) if self.steps > 1 else 0.5
        return LEFT + (WIDTH - LEFT - RIGHT) * fraction

    def stretches(self, line: Line) -> tuple[str, ...]:
        """Return the points of the unbroken stretches of a line."""
        stretches: list[list[str]] = [[]]
        for step, value in enumerate(line):
            height = None if value is None else self.scale.height(value)
            if height is None:
                stretches.append([])
            else:
                stretches[-1].append(f"{self.across(step):.1f},{height:.1f}")
        for points in stretches:
            # a polyline needs two points to be seen
            if len(points) == 1:
                points.append(points[0])
        return tuple(" ".join(points) for points in stretches if points)

    def outline(self, least: Line, most: Line) -> str:
        """Return the points around a band: along its upper edge, and back along its lower one; empty without a band."""
        upper_edge, lower_edge = self.stretches(most), self.stretches(least)
        if not upper_edge or not lower_edge:
            return ""
        way_back = " ".join(reversed(lower_edge[0].split()))
        return f"{upper_edge[0]} {way_back}"

    def point(self, line: Line, step: int | None) -> tuple[float, float] | None:
        """Return the point of a line at a step, from 1; None where there is no step, or no value there."""
        if step is None or step > len(line):
            return None
        value = line[step - 1]
        height = None if value is None else self.scale.height(value)
        return None if height is None else (self.across(step - 1), height)

    def step_ticks(self) -> tuple[Tick, ...]:
        """Return the ticks of the axis across."""
        stride = max(1, math.ceil(self.steps / _STEP_LABELS))
        numbered = range(stride, self.steps + 1, stride)
        return tuple(Tick(position=self.across(number - 1), label=str(number)) for number in numbered)


def _table_row(curves: Sequence[Mapping[str, Any]], step: int) -> tuple[str, ...]:
    """Return the table's texts of a step, from 0."""
    texts = [str(step + 1)]
    for curve in curves:
        texts += [_text_at(curve, "loss", step), _text_at(curve, "distance", step)]
    least, most = (_text_at(curves[0], f"noise_{end}_distance", step) for end in ("least", "most"))
    return (*texts, _text_at(curves[0], "float64_loss", step), f"{least} to {most}")


def _text_at(curve: Mapping[str, Any], figure: str, step: int) -> str:
    values = numbers(curve, figure)
    return _number(values[step]) if step < len(values) else "–"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _template_values(comparison: Comparison) -> dict[str, Any]:
    shown = trainings(comparison.tensors)
    if shown is None:
        return {}
    size = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT}
    return {"trainings": shown, "chart_size": size}


SECTION = PageSection(package=__package__, template="trainings.html", values=_template_values)
