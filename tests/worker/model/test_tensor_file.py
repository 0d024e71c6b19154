"""Tensors that are written slice by slice, and read as safetensors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from consistency.errors import CaptureError
from consistency.numerics import sizes
from consistency.numerics.file_tensor import FileTensor, mapped
from consistency.worker.model.tensor_file import TensorFile

LAYOUT = {
    "a": (torch.bfloat16, (2, 3, 5)),
    "b": (torch.float64, (2, 7)),
    "never": (torch.float32, (2, 1)),
    "scalars": (torch.float16, (2,)),
}


def test_slices_are_read_back_in_any_order(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "x.safetensors", LAYOUT)
    made = {name: torch.randn(*shape).to(dtype) for name, (dtype, shape) in LAYOUT.items() if name != "never"}
    for index in (1, 0):
        for name, tensor in made.items():
            file.write(name, index, tensor[index])
    for name, tensor in made.items():
        found = file.read(name)
        assert found is not None
        assert torch.equal(mapped(found), tensor)
    assert file.read("never") is None
    assert file.written == set(made)
    file.close()
    assert torch.equal(load_file(file.path)["b"], made["b"]), "a file as any other"
    assert torch.equal(load_file(file.path)["never"], torch.zeros(2, 1))


def test_elements_are_written_in_any_order_and_a_large_tensor_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "PART", 20)
    file = TensorFile(tmp_path / "x.safetensors", LAYOUT)
    made = torch.randn(30).bfloat16()
    for part in (slice(7, 30), slice(0, 7)):
        file.write_elements("a", part.start, made[part])
    found = file.read("a")
    assert isinstance(found, FileTensor)
    assert (found.shape, found.dtype) == ((2, 3, 5), torch.bfloat16)
    assert torch.equal(mapped(found), made.view(2, 3, 5))
    file.close()


def test_the_file_goes_with_its_owner(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "x.safetensors", LAYOUT)
    file.close(remove=True)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_no_fault_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TensorFile(tmp_path / "x.safetensors", LAYOUT)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CaptureError, match="cannot write a scratch file"):
        file.write("b", 0, torch.zeros(7, dtype=torch.float64))
    file.close(remove=True)
