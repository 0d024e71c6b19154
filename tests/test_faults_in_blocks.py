"""On a trained model the stage `forward` finds what is wrong in one layer, in that layer alone, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults_in_blocks import FAULTS, Reference, layers_of, outside, reference_of

LAYERS = (0, 15)

BELOW_ROUNDING = {("bfloat16", "one element × 1.5")}
"""What one rounding of the dtype hides in some places: an element that is small beside the others of its row."""


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def reference(request: pytest.FixtureRequest, smollm2: Path) -> Reference:
    return reference_of(smollm2, request.param)


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
@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1.02), ("float32", 1 + 1e-5)])
def test_a_wrong_scale_of_one_module_is_found(smollm2: Path, dtype: str, factor: float) -> None:
    reference = reference_of(smollm2, dtype)
    mlp = layers_of(reference.model)[15].mlp
    handle = mlp.register_forward_hook(lambda _, __, found: found * factor)
    wrong = outside(reference.figures())
    handle.remove()
    assert "model.layers.15.mlp" in wrong
