"""What torch warns of while a stage runs, whatever hides warnings meanwhile."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from consistency.capture.records import TensorRecord
from consistency.numerics.digest import digest
from consistency.numerics.rules import Rule
from consistency.worker.determinism import deterministic
from consistency.worker.nondeterministic import NondeterministicOperations
from consistency.worker.recorder import Recorder
from tests.capture.whole import read_records

UNPOOLING = "max_unpooling2d_forward_out"
"""An operation that has no deterministic version on the CPU either."""


def unpool() -> torch.Tensor:
    pooled, places = torch.nn.functional.max_pool2d(torch.rand(1, 1, 4, 4), 2, return_indices=True)
    return torch.nn.functional.max_unpool2d(pooled, places, (2, 2))


def test_operations_are_known_by_torch_s_own_warning() -> None:
    with deterministic(threads=1), warnings.catch_warnings(record=True), NondeterministicOperations() as operations:
        torch.rand(4).sum()
        assert operations.ran() == ()
        unpool()
        unpool()
        assert operations.ran() == (UNPOOLING,)
        operations.begin()
        assert operations.ran() == ()
        unpool()
        assert operations.ran() == (UNPOOLING,), "each stage has its own"


def test_a_library_that_silences_warnings_hides_none_of_a_later_stage() -> None:
    with (
        deterministic(threads=1),
        warnings.catch_warnings(record=True),
        NondeterministicOperations() as operations,
    ):
        warnings.simplefilter("ignore")
        warnings.showwarning = lambda *_, **__: None
        operations.begin()
        unpool()
        assert operations.ran() == (UNPOOLING,)


def test_warnings_that_torch_gives_once_are_seen_in_every_stage() -> None:
    """Those of the attention kernels are such."""
    with deterministic(threads=1), NondeterministicOperations():
        assert torch.is_warn_always_enabled()
    assert not torch.is_warn_always_enabled()


@pytest.mark.parametrize("kernel", ["Flash Attention", "Memory Efficient attention", "cuDNN Attention"])
def test_the_attention_kernels_are_named(kernel: str) -> None:
    text = f"{kernel} defaults to a non-deterministic algorithm. To explicitly enable determinism call torch.use_"
    with warnings.catch_warnings(record=True), NondeterministicOperations() as operations:
        warnings.warn(text, UserWarning, stacklevel=1)
        assert operations.ran() == (kernel,)


def test_other_warnings_are_shown_as_before() -> None:
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        with NondeterministicOperations() as operations:
            warnings.warn("the model is old", UserWarning, stacklevel=1)
        warnings.warn("afterwards", UserWarning, stacklevel=1)
    assert operations.ran() == ()
    assert shown == ["the model is old", "afterwards"]


def test_records_of_computed_tensors_name_what_ran_before_them(tmp_path: Path) -> None:
    with (
        deterministic(threads=1),
        warnings.catch_warnings(record=True),
        NondeterministicOperations() as operations,
        Recorder(tmp_path, tmp_path, operations=operations) as record,
    ):
        x = torch.ones(2)

        def compute(layer: str) -> None:
            record.computed(TensorRecord("forward", layer, "out", rule=Rule.PEER, status="measured"), x)

        compute("before")
        with operations.apart():
            unpool()
            compute("inside")
        compute("beside")
        unpool()
        compute("after")
        row = TensorRecord("adapter", "layer", "lora_A", rule=Rule.BITWISE, status="equal")
        record.moved(row, actual=x, expected=x)
        record.fact("memory", "layer", "peak", status="equal")
    found = {record.layer: record for record in read_records(tmp_path / "records.jsonl")}
    assert {name for name, record in found.items() if record.nondeterministic} == {"inside", "after"}
    assert found["after"].nondeterministic == (UNPOOLING,)
    assert found["after"].promised_digest is None
    assert found["before"].promised_digest == found["before"].digest == digest(x).value
