"""Bytes that lay in memory before are found where an allocator could have left them, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from consistency.stages.adapter.load_paths import stale_bytes

HELD = torch.randn(4096, generator=torch.Generator().manual_seed(1))
TENSORS = {"other": torch.ones(4096), "layers.0.weight": HELD.view(64, 64), "small": torch.ones(3)}


def at(byte: int, count: int = 128) -> torch.Tensor:
    return HELD.view(torch.uint8)[byte : byte + 4 * count].clone().view(torch.float32)


@pytest.mark.parametrize("start", [0, 512, 1024, 16384 - 512])
def test_what_an_allocator_could_have_left_is_named(start: int) -> None:
    assert stale_bytes(TENSORS, at(start)) == f"bytes {start} to {start + 512} of layers.0.weight"


@pytest.mark.parametrize("start", [4, 256, 508, 516, 1536 - 64])
def test_no_allocation_begins_elsewhere(start: int) -> None:
    assert stale_bytes(TENSORS, at(start)) is None


def test_a_whole_tensor_is_named_alone_whatever_its_shape_and_dtype() -> None:
    assert stale_bytes(TENSORS, HELD.clone().view(32, 128)) == "layers.0.weight"
    assert stale_bytes(TENSORS, HELD.clone().view(torch.int32)) == "layers.0.weight"
    assert stale_bytes({"t": HELD.view(64, 64).T}, HELD.view(64, 64).T.clone()) == "t"


def test_one_other_byte_is_another_tensor() -> None:
    wrong = at(512)
    wrong.view(torch.uint8)[-1] ^= 1
    assert stale_bytes(TENSORS, wrong) is None
    wrong = at(512)
    wrong.view(torch.uint8)[0] ^= 1
    assert stale_bytes(TENSORS, wrong) is None


@pytest.mark.parametrize(
    "tensor", [torch.ones(128), torch.zeros(128), torch.zeros(0), HELD[:15].clone(), torch.tensor(1.5)]
)
def test_what_could_be_chance_is_no_sign(tensor: torch.Tensor) -> None:
    """A constant, nothing at all, and fewer than 64 bytes."""
    assert stale_bytes(TENSORS, tensor) is None


def test_sixteen_numbers_are_enough() -> None:
    assert stale_bytes(TENSORS, HELD[:16].clone()) == "bytes 0 to 64 of layers.0.weight"


def test_nothing_was_held_before() -> None:
    assert stale_bytes({}, at(0)) is None
    assert stale_bytes({"sparse": torch.eye(64).to_sparse(), "empty": torch.zeros(0)}, at(0)) is None
