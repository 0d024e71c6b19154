"""Tensors of more than 2**31 elements: sparse files, and memory that is mapped again and again, take no room."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from consistency.extras.merging.diff.weights import diff_weights
from consistency.numerics.bound import Allowance
from consistency.numerics.chunks import LowRankProduct, LowRankTensor
from consistency.numerics.digest import combine, digest
from consistency.numerics.distance import measure
from consistency.numerics.error import measure_low_rank
from consistency.numerics.file_tensor import FileTensor, mapped, read_tensor
from consistency.numerics.kernels.numpy_digest import BLOCK_BYTES
from tests.numerics.digest_by_definition import by_definition

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("numerics_path")]

BEYOND = 2**31
ELEMENTS = BEYOND + 3 * BLOCK_BYTES + 77
BFLOAT16 = {1.0: b"\x80\x3f", 3.0: b"\x40\x40", -0.0: b"\x00\x80"}
"""Little-endian bytes of a few numbers."""


def sparse(path: Path, dtype: str, elements: int, written: Mapping[int, bytes]) -> Path:
    """Write a safetensors file of one tensor `w` of zeros, of which the file system keeps only what is not zero.

    `written` has bytes by their place in the tensor.
    """
    size = elements * {"U8": 1, "BF16": 2}[dtype]
    if shutil.disk_usage(path.parent).free < size:
        pytest.skip(f"{path.parent} has no room for {size >> 30} GiB: a file system in memory would keep what is read")
    head = json.dumps({"w": {"dtype": dtype, "shape": [elements], "data_offsets": [0, size]}}).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
        for place, data in written.items():
            file.seek(8 + len(head) + place)
            file.write(data)
    if path.stat().st_blocks * 512 > size // 2:
        pytest.skip(f"the file system of {path.parent} keeps zeros")
    return path


def zeros(*shape: int) -> torch.Tensor:
    """Make zeros that take no room until they are written; those of torch are written at once."""
    return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)


def opened(path: Path) -> torch.Tensor:
    tensor = read_tensor(path, "w")
    assert isinstance(tensor, FileTensor)
    return mapped(tensor)


@pytest.mark.parametrize("dtype", ["U8", "BF16"])
def test_the_digest_sees_what_lies_beyond(dtype: str, tmp_path: Path) -> None:
    width = {"U8": 1, "BF16": 2}[dtype]
    written = {
        5: b"\1",
        BEYOND * width - 1: b"\2\3",
        BEYOND * width + BLOCK_BYTES + 9: b"\4",
        ELEMENTS * width - 1: b"\5",
    }
    blocks = [0] * -(-ELEMENTS * width // BLOCK_BYTES)
    content: dict[int, bytearray] = {}
    for place, data in written.items():
        for byte, value in enumerate(data, place):
            content.setdefault(byte // BLOCK_BYTES, bytearray(BLOCK_BYTES))[byte % BLOCK_BYTES] = value
    assert len(content) == 5
    for number, block in content.items():
        (blocks[number],) = by_definition(bytes(block))
    found = digest(opened(sparse(tmp_path / "w.safetensors", dtype, ELEMENTS, written)))
    assert found.blocks == tuple(blocks)
    name = {"U8": "uint8", "BF16": "bfloat16"}[dtype]
    assert found == combine(name, (ELEMENTS,), tuple(blocks))


def test_a_measure_sees_what_lies_beyond(tmp_path: Path) -> None:
    first, worst, last = BEYOND - 1, BEYOND + 70_000, ELEMENTS - 1
    actual = {2 * first: BFLOAT16[1.0], 2 * worst: BFLOAT16[3.0], 2 * last: BFLOAT16[-0.0]}
    a = opened(sparse(tmp_path / "a.safetensors", "BF16", ELEMENTS, actual))
    e = opened(sparse(tmp_path / "e.safetensors", "BF16", ELEMENTS, {2 * worst: BFLOAT16[1.0]}))
    found = measure(a, e)
    assert (found.elements, found.mismatched) == (ELEMENTS, 3)
    assert found.worst_index == (worst,)
    assert (found.max_abs, found.max_rel) == (2.0, float("inf"))
    assert found.mean_abs == 3.0 / ELEMENTS
    assert found.rms == (5.0 / ELEMENTS) ** 0.5
    assert found.flipped_bits == {6: 1, **dict.fromkeys(range(7, 14), 2), 14: 1, 15: 1}
    assert (found.first_byte, found.last_byte) == (2 * first, 2 * last)


def test_weight_files_that_differ_beyond_are_told_apart(tmp_path: Path) -> None:
    worst = BEYOND + 70_000
    a = sparse(tmp_path / "a.safetensors", "BF16", ELEMENTS, {2 * worst: BFLOAT16[3.0]})
    e = sparse(tmp_path / "e.safetensors", "BF16", ELEMENTS, {2 * worst: BFLOAT16[1.0]})
    (tensor,) = diff_weights(a, e).tensors
    (found,) = (outcome for outcome in tensor.outcomes if outcome.status == "outside")
    assert (found.mismatched, found.worst_index) == (1, (worst,))


@contextmanager
def repeated(page: np.ndarray, times: int) -> Iterator[np.ndarray]:
    """Map the same memory again and again, one after the other; `page` has a multiple of the system's page size."""
    c = ctypes.CDLL(None)
    c.mmap.restype = ctypes.c_void_p
    c.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    c.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    memory = os.memfd_create("page")
    os.write(memory, page.tobytes())
    reserved, fixed, failed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10, ctypes.c_void_p(-1).value
    start = c.mmap(None, page.nbytes * times, 0, reserved, -1, 0)
    assert start != failed
    try:
        for i in range(times):
            place = start + i * page.nbytes
            assert c.mmap(place, page.nbytes, mmap.PROT_READ, mmap.MAP_SHARED | fixed, memory, 0) == place
        yield np.ctypeslib.as_array((ctypes.c_uint8 * (page.nbytes * times)).from_address(start)).view(page.dtype)
    finally:
        c.munmap(start, page.nbytes * times)
        os.close(memory)


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
def test_more_differences_than_32_bits_can_count(numerics_path: str) -> None:
    if numerics_path == "numpy":
        pytest.skip("the counts of NumPy's path are Python's integers, and it would take minutes")
    ones = torch.ones(1 << 23, dtype=torch.bfloat16)
    times = 2**32 // ones.numel() + 1
    with repeated(ones.view(torch.int16).numpy(), times) as memory:
        a = torch.from_numpy(memory).view(torch.bfloat16)
        found = measure(a, zeros(a.numel()))
    elements = ones.numel() * times
    assert elements > 2**32
    assert (found.elements, found.mismatched) == (elements, elements)
    assert (found.max_abs, found.mean_abs, found.rms) == (1.0, 1.0, 1.0)
    assert found.worst_index == (0,)
    assert found.flipped_bits == dict.fromkeys(range(7, 14), elements)
    assert (found.first_byte, found.last_byte) == (0, 2 * elements - 2)


def test_a_product_sees_what_lies_beyond() -> None:
    rows, columns = 2**16 + 3, 2**15 + 5
    assert (rows - 1) * columns > BEYOND
    left, right = torch.zeros(rows, 1, dtype=torch.float64), torch.ones(1, columns, dtype=torch.float64)
    left[-1] = 0.5
    actual = zeros(rows, columns)
    actual[-1] = 0.5
    actual[-1, 17] = 0.625
    tensor = LowRankTensor(actual=actual, allowance=Allowance(product=0.0, floor=0.25), has_base=False)
    (found,) = measure_low_rank([tensor], LowRankProduct(left=left, right=right, scaling=1.0))
    assert (found.elements, found.mismatched, found.worst_index) == (rows * columns, 1, (rows - 1, 17))
    assert (found.max_abs, found.max_rel, found.ratio, found.magnitude) == (0.125, 0.25, 0.5, 0.5)
