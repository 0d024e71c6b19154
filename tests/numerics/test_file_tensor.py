"""Tensors that are read from their file a part at a time: the same results, and no more of them resident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from consistency.numerics import sizes
from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import CHUNK, exact_chunks
from consistency.numerics.error import measure_against_exact
from consistency.numerics.file_tensor import FileTensor, elements_of, mapped, parts_of, read_tensor
from consistency.numerics.independent_errors import independent_lines, independent_rows

SHAPE = (3, 50, 2 * CHUNK // 10)
"""Some ten chunks a pass: parts end within a row and within a pass."""


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, FileTensor, FileTensor]:
    monkeypatch.setattr(sizes, "PART", 2 * CHUNK)
    exact = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = exact.float()
    actual[2, 7, 5] += 1
    save_file({"actual": actual, "exact": exact}, tmp_path / "x.safetensors")
    files = [read_tensor(tmp_path / "x.safetensors", name) for name in ("actual", "exact")]
    assert all(isinstance(file, FileTensor) for file in files)
    return actual, exact, *files  # type: ignore[return-value]


def test_small_tensors_are_read_at_once(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3, 4)}, tmp_path / "x.safetensors")
    found = read_tensor(tmp_path / "x.safetensors", "x")
    assert isinstance(found, torch.Tensor)
    assert torch.equal(elements_of(found)(slice(2, 5)), torch.ones(3))


def test_parts_are_the_tensor(pair: tuple[torch.Tensor, torch.Tensor, FileTensor, FileTensor]) -> None:
    actual, _, file, _ = pair
    assert (file.shape, file.dtype) == (SHAPE, torch.float32)
    assert torch.equal(mapped(file), actual)
    parts = list(parts_of(0, actual.numel()))
    assert len(parts) == 15
    assert torch.equal(torch.cat([elements_of(file)(part) for part in parts]), actual.reshape(-1))
    turned = actual.transpose(0, 1)
    assert torch.equal(elements_of(turned)(slice(3, 9)), turned.reshape(-1)[3:9])


@pytest.mark.parametrize("tolerance", [None, UserAllowance(atol=0.5, rtol=0.0)])
def test_parts_are_measured_as_the_whole(
    pair: tuple[torch.Tensor, torch.Tensor, FileTensor, FileTensor], tolerance: UserAllowance | None
) -> None:
    actual, exact, file, exact_file = pair
    whole = measure_against_exact(actual, exact, tolerance)
    assert repr(measure_against_exact(file, exact_file, tolerance)) == repr(whole)
    assert whole.worst_index == (2, 7, 5)
    for count in (independent_lines, independent_rows):
        assert count(file, exact_file) == count(actual, exact)
    chunks = list(exact_chunks(file, exact_file, tolerance))
    assert [chunk.start for chunk in chunks] == list(range(0, actual.numel(), CHUNK))
    assert torch.equal(torch.cat([chunk.actual for chunk in chunks]), actual.reshape(-1))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can restart the high-water mark")
def test_no_more_is_resident_than_the_parts_in_use(tmp_path: Path) -> None:
    """In a process whose allocator gives back what is freed: glibc keeps blocks of such a size by turns."""
    layout = {"actual": torch.float32, "exact": torch.float64}
    file = tmp_path / "x.safetensors"
    save_file({name: torch.zeros(1, 1 << 12, 1 << 11, dtype=dtype) for name, dtype in layout.items()}, file)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PEAKS, file], check=False, capture_output=True, text=True, timeout=120,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    part = (4 + 8 + 8) * sizes.PART  # of both, and the errors
    for name, (in_parts, whole) in json.loads(done.stdout).items():
        assert in_parts < 2 * part, (name, in_parts)
        assert whole > 90 * 2**20, f"{name}: both have 96 MiB"


PEAKS = """
import json, sys
from pathlib import Path
import torch
from consistency.numerics import file_tensor, independent_errors, sizes
from consistency.numerics.error import measure_against_exact

torch.set_num_threads(1)
independent_errors._ELEMENTS_AT_ONCE = sizes.PART
files = [file_tensor.read_tensor(Path(sys.argv[1]), name) for name in ("actual", "exact")]

def high_water():
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

def peak_of(read, *tensors):
    read(*(tensor.flatten()[:8] for tensor in map(file_tensor.mapped, tensors)))  # what is made once is made
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = high_water()
    read(*tensors)
    return high_water() - before

print(json.dumps({
    read.__name__: (peak_of(read, *files), peak_of(read, *map(file_tensor.mapped, files)))
    for read in (measure_against_exact, independent_errors.independent_lines)
}))
"""
