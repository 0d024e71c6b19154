"""Where a training goes wrong is one sentence: the first step, layer and part, and the loss there."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.capture.records import TensorRecord
from consistency.comparison.result import Comparison, Finding
from consistency.numerics.real import Real
from tests.comparison.made_records import compared, computed, errors, measured, moved, rounding
from tests.conftest import MakeCapture

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
STEPS = 6


def curve(loss: float = 4.0, **changes: Any) -> TensorRecord:
    losses = [loss - step / 10 for step in range(STEPS)]
    evidence = {
        "steps": STEPS, "loss": losses, "norm": losses, "distance": [1e-5 * (step + 1) for step in range(STEPS)],
        "float64_loss": [value - 0.001 for value in losses], "noise_least_distance": [1e-5] * STEPS,
        "noise_most_distance": [2e-4] * STEPS, **changes,
    }  # fmt: skip
    return TensorRecord(
        stage="trajectory", layer="model", tensor="curve", rule="limit", status="within", evidence=evidence
    )  # fmt: skip


def row(layer: str, tensor: str, step: int, *, wrong: bool = True) -> TensorRecord:
    """Return a row as the stage writes it: a parameter by a bound, all else by the error that rounding makes."""
    if tensor.endswith(".updated"):
        return computed(
            ratio=14.0 if wrong else 0.5, stage="trajectory", layer=layer, tensor=tensor, evidence={"step": step}
        )
    error = Real(1e-3 if wrong else 1e-7)
    return computed(
        stage="trajectory", layer=layer, tensor=tensor, rule="relative", status="outside" if wrong else "within",
        measure=measured(ratio=None, max_abs=error), word=None, rounding=rounding(1e-6), evidence={"step": step},
    )  # fmt: skip


def found(make_capture: MakeCapture, **workers: list[TensorRecord]) -> Comparison:
    named = {name.replace("_", ":"): rows for name, rows in workers.items()}
    return compared(make_capture("host", named))


def left(comparison: Comparison) -> Finding:
    (finding,) = errors(comparison)
    assert finding.kind == "left-trajectory"
    return finding


HEALTHY = [
    row("hidden_states.1", "forward", 2, wrong=False), row(UP, "lora_B.gradient", 1, wrong=False),
    row(UP, "lora_B.updated", 6, wrong=False), curve(),
]  # fmt: skip


def test_the_sentence_names_step_layer_part_and_loss(make_capture: MakeCapture) -> None:
    wrong = [
        row("hidden_states.1", "forward", 6), row(UP, "lora_B.gradient", 5), row(UP, "lora_B.updated", 5),
        curve(4.3),
    ]  # fmt: skip
    finding = left(found(make_capture, cpu=HEALTHY, cuda_1=wrong))
    assert finding.message == (
        f"trajectory · cuda:1 · leaves the float64 trajectory at step 5, in the gradient of lora_B of {UP}: "
        "486× tolerance; loss 3.9 there, 3.899 in float64; steps 1 to 4 are within tolerance"
    )
    assert finding.workers == ("cuda:1",)
    assert set(finding.tensors) == {
        "trajectory::hidden_states.1.forward", f"trajectory::{UP}.lora_B.gradient", f"trajectory::{UP}.lora_B.updated",
    }  # fmt: skip
    assert finding.next is not None


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        (
            [row("hidden_states.2", "forward", 3), row("hidden_states.1", "forward", 3), row(UP, "lora_B.updated", 3)],
            "at step 3, in hidden_states.1 of the forward pass",
        ),
        (
            [
                row(Q, "lora_A.gradient", 3),
                row(UP, "lora_A.gradient", 3),
                row(UP, "lora_B.updated", 3),
            ],
            f"at step 3, in the gradient of lora_A of {UP}",
        ),
        (
            [row(Q, "lora_A.updated", 3), row(UP, "lora_A.updated", 3), row(UP, "lora_B.gradient", 4)],
            f"at step 3, in lora_A of {Q} after the optimizer's step",
        ),
    ],
    ids=["forward before all else, in the order of the model", "gradients from the last layer on", "then parameters"],
)
def test_what_a_step_does_first_is_looked_at_first(
    make_capture: MakeCapture, rows: list[TensorRecord], place: str
) -> None:
    assert place in left(found(make_capture, cpu=HEALTHY, cuda_1=[*rows, curve()])).message


@pytest.mark.parametrize(
    ("step", "ending"),
    [(1, "in float64"), (2, "; step 1 is within tolerance"), (3, "; steps 1 and 2 are within tolerance")],
)
def test_the_steps_before_it_are_counted(make_capture: MakeCapture, step: int, ending: str) -> None:
    finding = left(found(make_capture, cpu=HEALTHY, cuda_1=[row(UP, "lora_B.gradient", step), curve()]))
    assert finding.message.endswith(ending)


def test_devices_that_leave_at_the_same_place_are_one_finding(make_capture: MakeCapture) -> None:
    wrong = [row(UP, "lora_B.gradient", 5), curve()]
    finding = left(found(make_capture, cpu=HEALTHY, cuda_1=wrong, cuda_3=wrong))
    assert finding.workers == ("cuda:1", "cuda:3")
    assert finding.message.startswith("trajectory · cuda:1, cuda:3 · leaves")


def test_wrong_weights_explain_a_training(make_capture: MakeCapture) -> None:
    base = {"stage": "base", "layer": UP, "tensor": "weight"}
    wrong = [moved(held="other", **base), row(UP, "lora_B.gradient", 1), curve()]
    (finding,) = errors(found(make_capture, cpu=[moved(**base), *HEALTHY], cuda_1=wrong))
    assert finding.kind == "bit-flip"
    assert [one.stage for one in finding.consequences] == ["trajectory"]


def test_a_healthy_run_says_how_near_it_is(make_capture: MakeCapture) -> None:
    comparison = found(make_capture, cpu=HEALTHY, cuda_0=[*HEALTHY[:-1], curve(4.1)])
    assert comparison.verdict == "consistent"
    (note,) = (finding for finding in comparison.findings if finding.kind == "kept-trajectory")
    assert note.message == (
        "trajectory · cpu, cuda:0 · 6 steps: every step is what rounding makes; after the last one the adapter is "
        "6e-05 from the float64 trajectory (noise alone: 1e-05 to 0.0002), loss 3.5 to 3.6 against 3.499 to 3.599"
    )
    assert note.severity == "note"


def test_numbers_that_are_not_finite_leave_the_sentence_without_them(make_capture: MakeCapture) -> None:
    broken = curve(distance=[None] * STEPS, float64_loss="4.0", steps="6")
    (note,) = found(make_capture, cpu=[*HEALTHY[:-1], broken]).findings
    assert note.message.endswith("every step is what rounding makes")
