"""Stage `forward` of a model that counts as large: without its adapter it runs some of the sequences, and says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON, SEQUENCES
from consistency.case.builtin import builtin_folder
from consistency.case.stages import LEVELS, Level
from consistency.comparison.result import Comparison

Run = Callable[..., Comparison]

LEFT_OUT = "the model without its adapter on more than 4 of 8 sequences"


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(LEVELS[Level.STANDARD], float64_merges=1 << 10)
    monkeypatch.setitem(LEVELS, Level.STANDARD, small)


def sequences(comparison: Comparison) -> dict[str, set[int]]:
    """Return how many sequences are in the activations of each mode."""
    found: dict[str, set[int]] = {}
    for tensor in comparison.tensors:
        if tensor.stage == "forward" and tensor.tensor in (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED):
            found.setdefault(tensor.tensor, set()).add(tensor.shape[0])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_it_runs_the_first_sequences_without_the_adapter(run_with_faults: Run) -> None:
    found = run_with_faults({}, stages=("forward",))
    assert found.verdict == "consistent"
    assert sequences(found) == {ADAPTER_ON: {8}, ADAPTER_OFF: {4}, ADAPTER_MERGED: {8}}
    assert LEFT_OUT in found.not_checked
    for tensor in found.tensors:
        if tensor.stage == "forward":
            few = {"4 of 8"} if tensor.tensor == ADAPTER_OFF else {None}
            assert {row.evidence.get(SEQUENCES) for row in tensor.outcomes} == few
            assert all(row.ratio is not None for row in tensor.outcomes)


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_how_much_the_adapter_moves_the_outputs_is_of_those_sequences(run_with_faults: Run) -> None:
    found = run_with_faults({}, stages=("forward",), devices=("cpu",))
    (merging,) = found.merging
    assert merging.adapter is not None


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_a_fault_is_found_there(run_with_faults: Run) -> None:
    found = run_with_faults({"cpu@baseline": "forward-off"}, stages=("forward",))
    assert found.verdict == "inconsistent"
    outside = {t.tensor for t in found.tensors for row in t.outcomes if row.status == "outside"}
    assert ADAPTER_OFF in outside


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_inputs_of_the_user_run_whole(run_with_faults: Run, tmp_path: Path) -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 90, (6, 5)))
    save_file({"input_ids": ids}, tmp_path / "inputs.safetensors")
    found = run_with_faults({}, stages=("forward",), inputs=str(tmp_path / "inputs.safetensors"))
    assert sequences(found) == {ADAPTER_ON: {6}, ADAPTER_OFF: {6}, ADAPTER_MERGED: {6}}
    assert LEFT_OUT not in found.not_checked


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_a_base_alone_runs_whole(run_with_faults: Run) -> None:
    base = str(builtin_folder("llama") / "base")
    found = run_with_faults({}, base=base, stages=("forward",), devices=("cpu",))
    assert sequences(found) == {ADAPTER_OFF: {8}}


@pytest.mark.slow
def test_a_small_model_runs_whole(run_with_faults: Run) -> None:
    found = run_with_faults({}, stages=("forward",), devices=("cpu",))
    assert sequences(found)[ADAPTER_OFF] == {8}
    assert LEFT_OUT not in found.not_checked
