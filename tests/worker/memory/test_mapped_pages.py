"""Pages of mapped files that are dropped: bytes that were written, or are in no file, stay."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from consistency.worker.memory import mapped_pages
from consistency.worker.memory.mapped_pages import release
from tests.worker.memory.resident_pages import resident

pytestmark = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="only Linux reports pages")

SIZE = 1 << 22
LARGE_PAGE = 1 << 21


def mapped(path: Path) -> dict[str, torch.Tensor]:
    """Save and map tensors, and read them."""
    save_file({name: torch.full((SIZE,), value) for name, value in {"a": 1.0, "b": 2.0}.items()}, path)
    with safe_open(path, framework="pt", device="cpu") as file:
        found = {name: file.get_tensor(name) for name in ("a", "b")}
    assert [float(tensor.sum()) for tensor in found.values()] == [SIZE, 2 * SIZE]
    return found


@pytest.mark.parametrize("at_once", [mapped_pages._ENTRIES_AT_ONCE, 100])
def test_pages_of_a_file_are_dropped_and_read_again(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_pages, "_ENTRIES_AT_ONCE", at_once)
    found = mapped(tmp_path / "x.safetensors")
    before = resident(tmp_path / "x.safetensors")
    assert before >= 8 * SIZE
    release(found.values())
    assert resident(tmp_path / "x.safetensors") <= 2 * mmap.PAGESIZE, "whole pages: those at the ends may hold more"
    assert all(bool((tensor == value).all()) for tensor, value in zip(found.values(), (1.0, 2.0), strict=True))


def test_what_was_written_keeps_its_bytes(tmp_path: Path) -> None:
    found = mapped(tmp_path / "x.safetensors")
    found["a"][5000:7000] = 7.0
    found["b"][-1] = 8.0
    twin = {name: tensor.clone() for name, tensor in found.items()}
    release(found.values())
    assert resident(tmp_path / "x.safetensors") < SIZE
    assert all(torch.equal(tensor, twin[name]) for name, tensor in found.items())


def test_one_tensor_of_a_file_is_dropped_alone(tmp_path: Path) -> None:
    found = mapped(tmp_path / "x.safetensors")
    release([found["b"]])
    assert 4 * SIZE - LARGE_PAGE <= resident(tmp_path / "x.safetensors") <= 4 * SIZE + LARGE_PAGE


def test_memory_of_no_file_stays() -> None:
    private = torch.ones(SIZE)
    release([private, private[100:], torch.ones(3), torch.empty(0), torch.empty(4, device="meta")])
    assert bool((private == 1).all())


def test_nothing_is_dropped_where_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = mapped(tmp_path / "x.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", "darwin")
        release(found.values())

    def refused(*_: object) -> bytes:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pread", refused)
    release(found.values())
    assert resident(tmp_path / "x.safetensors") >= 8 * SIZE
