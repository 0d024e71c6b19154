"""Stage `forward` of a model that counts as large: its blocks are compared with the adapter alone, and it says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON
from consistency.case.builtin import builtin_folder
from consistency.case.stage import Level
from consistency.case.stages import LEVELS
from consistency.comparison.result import Comparison

Run = Callable[..., Comparison]

LEFT_OUT = "the model's blocks with adapter_off and adapter_merged"


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(LEVELS[Level.STANDARD], float64_merges=1 << 10)
    monkeypatch.setitem(LEVELS, Level.STANDARD, small)


def rows(comparison: Comparison) -> dict[str, int]:
    """Return how many tensors are compared in each mode, and from end to end."""
    found: dict[str, int] = {}
    for tensor in comparison.tensors:
        if tensor.stage == "forward":
            mode, _, part = tensor.tensor.partition(".")
            key = f"{mode}.{part}" if part == "end_to_end" else mode
            found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_its_blocks_are_compared_with_the_adapter_alone(run_with_faults: Run) -> None:
    found = run_with_faults({}, stages=("forward",))
    assert found.verdict == "consistent"
    assert LEFT_OUT in found.not_checked
    counts = rows(found)
    assert counts.pop(ADAPTER_ON) > 20
    assert counts == {f"{mode}.end_to_end": 1 for mode in (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED)}
    (merging,) = found.merging
    assert merging.adapter is not None, "how much the adapter moves the outputs"


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_a_fault_is_found_there(run_with_faults: Run) -> None:
    found = run_with_faults({"cpu@baseline": "forward-off"}, stages=("forward",))
    assert found.verdict == "inconsistent"
    assert {t.tensor.partition(".")[0] for t in found.tensors for row in t.outcomes if row.status == "outside"} == {
        ADAPTER_ON
    }


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_a_base_alone_is_compared(run_with_faults: Run) -> None:
    base = str(builtin_folder("llama") / "base")
    found = run_with_faults({}, base=base, stages=("forward",), devices=("cpu",))
    assert rows(found)[ADAPTER_OFF] > 20
    assert LEFT_OUT not in found.not_checked


@pytest.mark.slow
def test_a_small_model_is_compared_in_every_mode(run_with_faults: Run) -> None:
    found = run_with_faults({}, stages=("forward",), devices=("cpu",))
    counts = rows(found)
    given = 1  # merged blocks are given what unmerged ones are
    assert counts[ADAPTER_ON] == counts[ADAPTER_OFF] == counts[ADAPTER_MERGED] + given > 20
    assert LEFT_OUT not in found.not_checked
