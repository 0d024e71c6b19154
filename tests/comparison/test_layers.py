"""The tolerance report: per layer and architecture, the worst difference and what was allowed."""

from __future__ import annotations

import math

import pytest

from consistency.capture.names import ADAPTER_ON
from consistency.comparison.layers import LayerFilter, layers_of
from consistency.comparison.result import Outcome, TensorComparison
from consistency.numerics.real import Real
from tests.conftest import FinishedRun
from tests.report.made_comparisons import ALL, comparison, faulty, tensor


def row(worker: str, **fields: object) -> Outcome:
    return Outcome(**{"workers": (worker,), "reference": "float64", "status": "within", **fields})  # type: ignore[arg-type]  # made by name


def made(*rows: Outcome, rule: str = "bound", **fields: object) -> TensorComparison:
    plain = {"stage": "merged", "load_path": "isolated", "layer": "layers.0", "tensor": "weight", "shape": (2,)}
    of = {**plain, "dtype": "float32", "rule": rule, "classes": tuple(one.workers for one in rows), **fields}
    return TensorComparison(outcomes=rows, **of)  # type: ignore[arg-type]  # made by name


def test_a_cell_has_the_worst_of_its_architecture() -> None:
    found = made(
        row("cpu", max_abs=Real(9.0), allowed=Real(2.0), ratio=Real(0.25), max_ulp=7),
        row("cuda:0", max_abs=Real(1.0), allowed=Real(4.0), ratio=Real(0.2), max_ulp=9),
        row("cuda:1", max_abs=Real(3.0), allowed=Real(2.0), ratio=Real(1.5), max_ulp=5, status="outside"),
        classes=(("cpu", "cuda:0"), ("cuda:1",)),
    )
    (layer,) = layers_of(comparison([found]))
    gpu = layer.architectures["Ampere sm_86"]
    assert (gpu.workers, gpu.status, gpu.max_ulp) == (("cuda:0", "cuda:1"), "outside", 9)
    assert (gpu.max_abs, gpu.allowed, gpu.ratio) == (3.0, 2.0, 1.5)
    assert gpu.classes == (("cuda:0",), ("cuda:1",))
    cpu = layer.architectures["x86-64"]
    assert (cpu.max_abs, cpu.allowed, cpu.ratio) == (0.5, 2.0, 0.25), "of the element of that ratio"
    assert cpu.classes == (("cpu",),)


def test_one_tolerance_for_all_elements_is_that_of_the_largest_difference() -> None:
    found = made(row("cpu", max_abs=Real(0.3), allowed=Real(1.1), ratio=Real(0.3 / 1.1)), rule="relative")
    (layer,) = layers_of(comparison([found]))
    assert layer.architectures["x86-64"].max_abs == 0.3


def test_nothing_is_allowed_where_bits_must_be_equal() -> None:
    right, wrong = (
        row("cuda:0", status="equal", max_abs=Real(0.0)),
        row("cuda:1", status="outside", max_abs=Real("nan")),
    )
    (layer,) = layers_of(comparison([made(right, wrong, rule="bitwise")]))
    cell = layer.architectures["Ampere sm_86"]
    assert math.isnan(cell.max_abs or 0.0)
    assert (cell.allowed, cell.ratio, cell.status) == (0.0, None, "outside")


def test_not_a_number_is_worse_than_any_ratio() -> None:
    rows = [
        row("cuda:0", ratio=Real("nan"), status="outside"),
        row("cuda:1", ratio=Real(9), status="outside"),
    ]
    (layer,) = layers_of(comparison([made(*rows)]))
    assert math.isnan(layer.architectures["Ampere sm_86"].ratio or 0.0)


def test_a_tolerance_of_nothing_is_exceeded_by_the_largest_difference() -> None:
    rows = [row("cpu", max_abs=Real(0.25), allowed=Real(0), ratio=Real("inf"), status="outside")]
    (layer,) = layers_of(comparison([made(*rows, rule="user")]))
    cell = layer.architectures["x86-64"]
    assert (cell.max_abs, cell.allowed, cell.ratio) == (0.25, 0.0, math.inf)


def test_a_skipped_device_hides_no_figure_of_another() -> None:
    rows = [row("cuda:0", status="skipped"), row("cuda:1", ratio=Real(0.5), allowed=Real(1))]
    (layer,) = layers_of(comparison([made(*rows)]))
    assert layer.architectures["Ampere sm_86"].status == "within"


def test_copies_and_facts_have_no_tolerance_of_a_layer() -> None:
    found = [tensor([ALL], stage="transfer"), made(row("cpu"), rule="limit"), tensor([ALL], stage="base")]
    assert [one.stage for one in layers_of(comparison(found))] == ["base"]


def test_layers_are_chosen_by_stage_pattern_and_architecture() -> None:
    layers = list(layers_of(faulty()))

    def chosen(**by: object) -> list[tuple[str, str]]:
        return [(one.stage, one.layer) for one in LayerFilter(**by).chosen(layers)]  # type: ignore[arg-type]  # by name

    assert len(chosen()) == len(layers)
    assert {stage for stage, _ in chosen(stages=("base", "merged"))} == {"base", "merged"}
    assert {layer for _, layer in chosen(pattern="*.1.mlp")} == {"model.layers.1.mlp"}
    assert {layer for _, layer in chosen(pattern="*.2.mlp.lora_B")} == {"model.layers.2.mlp"}
    (one, *_) = LayerFilter(architecture="SM_86").chosen(layers)
    assert list(one.architectures) == ["Ampere sm_86"]
    assert not chosen(architecture="sm_90")


def test_a_real_run_states_what_was_allowed(finished_run: FinishedRun) -> None:
    from consistency.workflows.report_folder import read_comparison

    found, _ = read_comparison(finished_run.folder)
    cells = [
        (one.stage, one.tensor, cell) for one in layers_of(found) for cell in one.architectures.values()
        if cell.ratio is not None and cell.status in ("within", "outside") and cell.ratio > 0
    ]  # fmt: skip
    assert {stage for stage, _, _ in cells} >= {"operators", "merged", "forward"}
    assert {tensor for _, tensor, _ in cells} >= {"delta", "weight", ADAPTER_ON}
    for _, _, cell in cells:
        assert cell.max_abs is not None
        assert cell.allowed is not None
        assert cell.max_abs / cell.allowed == pytest.approx(cell.ratio, rel=1e-9)
