"""The kernel in Triton's interpreter, on the CPU; `test_triton_digest.py` runs this file in a process of its own.

Triton reads `TRITON_INTERPRET` when it is imported, and keeps to it for the whole process.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics import digest as digest_module
from consistency.numerics.digest import digest
from consistency.numerics.kernels import triton_digest
from consistency.numerics.kernels.numpy_digest import BLOCK_BYTES, ROW_BYTES, ROW_WORDS, sum_rows, sum_short_row
from consistency.numerics.kernels.triton_digest_kernel import launch

DTYPES = (torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def by_the_kernel(tensor: torch.Tensor, *, turns: int) -> digest_module.TensorDigest:
    def sums(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return launch(words.as_subclass(torch.Tensor), w, v, turns=turns)

    def rows_of(raw: np.ndarray) -> np.ndarray:
        return digest_module._rows_on_device(torch.from_numpy(raw).as_subclass(OnCuda))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_digest, "sums", sums)
        patch.setattr(digest_module, "_weights_on", lambda _: WEIGHTS)
        patch.setattr(digest_module, "_rows_on_cpu", rows_of)
        return digest(tensor)


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


WEIGHTS = digest_module._weights_on(torch.device("cpu"))


def tensor_of(size: int, *, seed: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """Cut a flat tensor of about `size` bytes out of a larger one, `offset` elements behind its start."""
    raw = np.random.default_rng(seed).integers(0, 256, size=offset * dtype.itemsize + size, dtype=np.uint8)
    if dtype is torch.bool:
        raw &= 1
    return torch.from_numpy(raw[: len(raw) // dtype.itemsize * dtype.itemsize].copy()).view(dtype)[offset:]


@given(
    size=st.integers(16, 5 * BLOCK_BYTES) | st.integers(1, 5).map(lambda blocks: blocks * BLOCK_BYTES),
    seed=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    turns=st.integers(1, 6),
)
@settings(max_examples=60)
def test_any_tensor_has_the_plain_digest(size: int, seed: int, offset: int, dtype: torch.dtype, turns: int) -> None:
    tensor = tensor_of(size, seed=seed, offset=offset, dtype=dtype)
    assert by_the_kernel(tensor, turns=turns) == digest(tensor)


@given(rows=st.integers(0, 5), rest=st.integers(1, ROW_WORDS), seed=st.integers(0, 2**32 - 1), turns=st.integers(1, 3))
@settings(max_examples=40)
def test_its_sums_are_those_of_numpy(rows: int, rest: int, seed: int, turns: int) -> None:
    words = tensor_of((rows * ROW_WORDS + rest) * 8, seed=seed, offset=0, dtype=torch.int64)
    expected = np.zeros(rows, np.int64)
    raw = words.numpy().view(np.uint8)
    sum_rows(raw[: rows * ROW_BYTES], expected)
    expected = np.append(expected, sum_short_row(raw[rows * ROW_BYTES :]))
    assert np.array_equal(launch(words, *WEIGHTS, turns=turns).numpy(), expected)


@pytest.mark.parametrize("fill", [-1, -(2**63), 2**63 - 1, 2**31, 2**32 - 1, 0])
def test_extreme_words_have_the_plain_digest(fill: int) -> None:
    tensor = torch.full((2 * BLOCK_BYTES // 8 + 11,), fill)
    assert by_the_kernel(tensor, turns=2) == digest(tensor)


def test_strided_views_and_parameters_have_the_plain_digest() -> None:
    tensor = torch.arange(300 * 500, dtype=torch.float32).view(300, 500)
    for view in (tensor.T, tensor[::2, ::3], tensor[7:, :], torch.nn.Parameter(tensor)):
        assert by_the_kernel(view, turns=1) == digest(view)


def test_the_check_on_first_use_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_digest, "_launch", launch)  # no CUDA device to make the current one
    assert triton_digest._check(*WEIGHTS) == triton_digest.FUSED
