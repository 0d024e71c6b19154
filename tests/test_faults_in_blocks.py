"""On a trained model `forward` and `gradient` find what is wrong in one layer, in that layer alone, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults_in_blocks import BACKWARD_FAULTS, FAULTS, Reference, layers_of, outside, reference_of

LAYERS = (0, 15)

BELOW_ROUNDING = {("bfloat16", "one element × 1.5"), ("bfloat16", "rotary tables off by one, backward")}
"""What one rounding of the dtype hides in some places: an element that is small beside the others of its row."""


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def reference(request: pytest.FixtureRequest, smollm2: Path) -> Reference:
    return reference_of(smollm2, request.param)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def backward(request: pytest.FixtureRequest, smollm2: Path) -> Reference:
    return reference_of(smollm2, request.param, backward=True)


def dtype_of(reference: Reference) -> str:
    return str(reference.model.dtype).removeprefix("torch.")


@pytest.mark.slow
def test_the_healthy_model_is_within_and_every_result_is_judged(reference: Reference) -> None:
    figures = reference.figures()
    assert figures.keys() == reference.exact.keys()
    assert len(figures) > 5 * 30
    assert max(one.ratio for one in figures.values()) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_layer_alone(reference: Reference, name: str) -> None:
    for number in LAYERS:
        with FAULTS[name](layers_of(reference.model)[number]):
            wrong = outside(reference.figures())
        if (dtype_of(reference), name) not in BELOW_ROUNDING:
            assert wrong, f"layer {number}"
        assert {module.split(".")[2] for module in wrong} <= {str(number)}


@pytest.mark.slow
def test_the_gradients_of_the_healthy_model_are_within(backward: Reference) -> None:
    figures = backward.figures()
    assert len(figures) == 30 * (1 + 2 * 3), "of each block's input, or of what leaves the last, and of each factor"
    assert max(one.ratio for one in figures.values()) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD_FAULTS)
def test_a_wrong_gradient_is_found_in_its_layer_alone(backward: Reference, name: str) -> None:
    for number in LAYERS:
        with BACKWARD_FAULTS[name](layers_of(backward.model)[number]):
            wrong = outside(backward.figures())
        if (dtype_of(backward), f"{name}, backward") not in BELOW_ROUNDING:
            assert wrong, f"layer {number}"
        assert {module.split(".")[2] for module in wrong} <= {str(number)}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1.02), ("float32", 1 + 1e-5)])
def test_a_wrong_scale_of_one_module_is_found(smollm2: Path, dtype: str, factor: float) -> None:
    reference = reference_of(smollm2, dtype)
    mlp = layers_of(reference.model)[15].mlp
    handle = mlp.register_forward_hook(lambda _, __, found: found * factor)
    wrong = outside(reference.figures())
    handle.remove()
    assert "model.layers.15.mlp" in wrong
