"""The curves of trainings in the page: what is drawn, what is said instead of it, and what a stranger may write."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.extras.training.trajectory.page import BOTTOM, HEIGHT, MOST_LINES, TOP, trainings
from consistency.report.html import as_html
from tests.report.made_comparisons import comparison

STEPS = 12


def evidence(times: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "steps": STEPS, "loss": [4 - step / 10 for step in range(STEPS)],
        "distance": [times * 1e-5 * 1.2**step for step in range(STEPS)],
        "float64_loss": [4 - step / 10 for step in range(STEPS)],
        "noise_least_distance": [5e-6] * STEPS, "noise_most_distance": [5e-4] * STEPS, **changes,
    }  # fmt: skip


def rows(stage_tensor: str, *outcomes: Outcome) -> TensorComparison:
    layer, _, tensor = stage_tensor.rpartition("::")
    return TensorComparison(
        stage="trajectory", load_path="isolated", layer=layer, tensor=tensor, shape=(), dtype="", rule="limit",
        classes=tuple(one.workers for one in outcomes), outcomes=outcomes,
    )  # fmt: skip


def outcome(worker: str, status: Any = "within", **given: Any) -> Outcome:
    return Outcome(workers=(worker,), reference=None, status=status, evidence=given)


def curves(*of_workers: tuple[str, dict[str, Any]]) -> TensorComparison:
    return rows("model::curve", *(outcome(worker, **given) for worker, given in of_workers))


TWO = curves(("cpu", evidence()), ("cuda:0", evidence(40)))
LEFT = rows("hidden_states.2::forward", outcome("cpu", step=3), outcome("cuda:0", "outside", step=4))


def test_every_worker_has_a_line_in_both_charts() -> None:
    found = trainings([LEFT, TWO])
    assert found is not None
    assert found.labels == ("cuda:0, leaves at step 4", "cpu"), "what is wrong comes first"
    loss, distance = found.charts
    for chart in (loss, distance):
        assert [len(points[0].split()) for points in chart.lines] == [STEPS, STEPS]
    assert loss.exact
    assert not loss.band
    assert len(distance.band.split()) == 2 * STEPS
    assert [point is not None for point in distance.left_at] == [True, False]
    assert len(found.rows) == STEPS


def test_distances_are_on_a_logarithmic_scale_inside_the_chart() -> None:
    found = trainings([TWO])
    assert found is not None
    heights = [float(point.partition(",")[2]) for point in found.charts[1].lines[0][0].split()]
    assert all(TOP <= height <= HEIGHT - BOTTOM for height in heights)
    steps = [before - after for before, after in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 0.25, "a constant factor is a straight line"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1", 0.0])
def test_a_number_that_cannot_be_drawn_breaks_the_line(value: object) -> None:
    distances = [*evidence()["distance"][:5], value, *evidence()["distance"][6:]]
    found = trainings([curves(("cpu", evidence(distance=distances)))])
    assert found is not None
    assert [len(part.split()) for part in found.charts[1].lines[0]] == [5, 6]


def test_one_step_is_a_point() -> None:
    found = trainings([curves(("cpu", {"steps": 1, "loss": [4.0], "distance": [1e-5]}))])
    assert found is not None
    assert found.charts[0].lines[0][0]
    assert found.rows[0][:3] == ("1", "4", "1e-05")


def test_of_many_workers_some_are_drawn_and_the_rest_is_counted() -> None:
    found = trainings([curves(*((f"cuda:{i}", evidence(i + 1)) for i in range(MOST_LINES + 3)))])
    assert found is not None
    assert (len(found.labels), found.left_out) == (MOST_LINES, 3)


def page(*tensors: TensorComparison) -> str:
    made: Comparison = comparison(list(tensors))
    return as_html(made)


def test_the_page_has_curves_and_a_table_with_their_numbers() -> None:
    text = page(LEFT, TWO)
    section = text[text.index('id="trainings"') : text.index('id="workers"')]
    assert section.count('role="img" aria-label="') == 2
    assert section.count("<circle") == 2
    assert "leaves at step 4" in section
    assert len(re.findall(r'<tr><th scope="row">', section)) == STEPS
    assert "<script" not in section
    assert not re.search(r"(?:href|src|url)\s*[=(]", section), "it fetches nothing"


def test_hostile_names_and_figures_stay_text() -> None:
    bad = "<script>alert(1)</script>"
    text = page(curves((bad, evidence(loss=[bad, 3.0], noise_most_distance=bad))))
    assert bad not in text
    assert "&lt;script&gt;" in text


def test_a_curve_without_a_single_number_is_not_drawn() -> None:
    found = trainings([curves(("cpu", {"loss": [None, None]}))])
    assert found is None
