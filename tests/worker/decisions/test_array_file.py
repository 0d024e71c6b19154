from __future__ import annotations

from pathlib import Path

import torch

from consistency.worker.decisions.array_file import ArrayFile


def test_arrays_come_back_in_another_reader(tmp_path: Path) -> None:
    path = tmp_path / "arrays.bin"
    file = ArrayFile(path)
    tensors = [
        torch.arange(11).reshape(11, 1) % 3 == 0,
        torch.linspace(0, 1, 6).reshape(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.empty(0, 4, dtype=torch.float64),
    ]
    parts = [file.append(tensor) for tensor in tensors]
    assert path.stat().st_size == 2 + 6 * 4 + 3 * 2 + 8, "truth values take a bit each"
    for part, tensor in zip(parts, tensors, strict=True):
        found = ArrayFile(path).read(part)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
