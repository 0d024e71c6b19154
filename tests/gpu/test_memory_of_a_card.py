"""Memory of a card: peaks, counters, a base that is streamed, and what it says when it is full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .machines import Card, Machine, on_gpus, on_gpus_and_the_double

pytestmark = pytest.mark.slow


@on_gpus_and_the_double
def test_peaks_of_merges_are_within_their_limit_whatever_the_size(machine: Machine, one_gpu: Card) -> None:
    """64 KiB, 1.1 MiB and 64 MiB: CUDA's allocator does not split what would leave less than 1 MiB of a large block, so
    that a block of the second size may count nearly twice; the double's blocks count what was asked for."""
    found = machine.inside("merge_shares", one_gpu.name)
    assert len(found) == 9
    for name, share in found.items():
        assert (share > 1) == name.endswith("third copy"), found


@on_gpus
def test_a_context_that_finds_no_memory_is_known_as_that(machine: Machine, one_gpu: Card) -> None:
    with machine.full(one_gpu):
        found = machine.inside("run_out", "context", one_gpu.name)
    assert found["raised"] is None or found["recognized"], found  # some drivers have a little left


@on_gpus
def test_a_product_that_finds_no_memory_is_known_as_that(machine: Machine, one_gpu: Card) -> None:
    """The first product makes the library's handle and workspace. If torch says it in other words than
    `worker/device_error.py` knows, it has to learn them."""
    found = machine.inside("run_out", "product", one_gpu.name)
    assert found["raised"] is None or found["recognized"], found


@on_gpus_and_the_double
def test_a_merge_that_finds_no_memory_is_known_as_that(machine: Machine, one_gpu: Card) -> None:
    """And is not taken for a layer that PEFT does not merge. The double is given little memory."""
    small = {"CONSISTENCY_DOUBLE": '{"devices": 1, "memory_bytes": 268435456}'} if machine.is_double else {}
    found = machine.inside("run_out", "merge", one_gpu.name, **small)
    assert found["raised"] is not None
    assert found["recognized"], found


@on_gpus_and_the_double
def test_a_streamed_base_gives_what_a_resident_one_does(machine: Machine, one_gpu: Card, tmp_path: Path) -> None:
    words = ("--devices", f"cpu,{one_gpu.name}", "--stages", "base,adapter,merged,forward", "--load-paths", "isolated")
    for placement in ("offload", "device"):
        done = machine.consistency("run", *words, "--placement", placement, "--out", tmp_path / placement)
        assert done.returncode == 0, done.stdout + done.stderr
    done = machine.consistency("compare", tmp_path / "offload", tmp_path / "device", "--out", tmp_path / "both")
    assert done.returncode == 0, done.stdout + done.stderr


BACKENDS = ["", "expandable_segments:True", "backend:cudaMallocAsync"]


@on_gpus_and_the_double
@pytest.mark.parametrize("allocator", BACKENDS)
def test_the_counters_follow_a_tensor(machine: Machine, one_gpu: Card, allocator: str) -> None:
    """By each allocator that torch has for CUDA; the double has one, whatever the variable says."""
    if "cudaMallocAsync" in allocator and machine.built_for.startswith("HIP"):
        pytest.skip("it is an allocator of CUDA")
    newer = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
    variable = "PYTORCH_ALLOC_CONF" if newer else "PYTORCH_CUDA_ALLOC_CONF"
    chosen = {variable: allocator} if allocator else {}
    before, held, after, peak = machine.inside("allocated", one_gpu.name, **chosen)
    assert before == after
    assert 2**25 <= held - before <= 2**25 + 2**21
    assert peak == held
