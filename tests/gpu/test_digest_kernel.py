"""The fused digest kernel on a GPU: the double has no Triton, and stands in nowhere here."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from consistency.numerics.digest import digest
from consistency.numerics.kernels import triton_digest
from consistency.numerics.kernels.numpy_digest import BLOCK_BYTES, ROW_BYTES
from consistency.worker import determinism
from tests.numerics.kernels.made_words import large, random_words

BLOCK_WORDS = BLOCK_BYTES // 8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed: only CUDA builds of torch bring it"
    ),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    monkeypatch.setattr(triton_digest, "_states", {})  # nothing was tried yet
    monkeypatch.delenv(triton_digest.PLAIN_VARIABLE, raising=False)
    return torch.device("cuda:0")


@pytest.mark.parametrize("offset", [0, 1, 3, 8, 16])
@pytest.mark.parametrize("extra", [0, 1, 8, BLOCK_BYTES, 3 * BLOCK_BYTES + 4099])
def test_the_kernel_runs_and_agrees_with_the_cpu(extra: int, offset: int, gpu: torch.device) -> None:
    """A tensor that does not begin on a word takes the plain path, so that one is no proof of the kernel."""
    data = large(extra=ROW_BYTES // 8).view(torch.uint8)
    tensor = torch.cat([data, data[: 4 * BLOCK_BYTES]])[: offset + triton_digest._WORTH_BYTES + extra]
    assert digest(tensor.to(gpu)[offset:]) == digest(tensor[offset:])
    if offset % 8 == 0:
        assert triton_digest.state(gpu) == "fused"


def test_more_words_than_fit_an_int_agree_with_the_cpu(gpu: torch.device) -> None:
    before = 2**31 // BLOCK_WORDS  # blocks, 16 GiB
    if torch.cuda.mem_get_info(gpu)[0] < before * BLOCK_BYTES * 5 // 4:
        pytest.skip("less than 20 GiB of free memory on the GPU")
    end = random_words(3 * ROW_BYTES // 8 + 5)
    tensor = torch.zeros(before * BLOCK_WORDS + len(end), dtype=torch.int64, device=gpu)
    tensor[before * BLOCK_WORDS :] = end.to(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    held = torch.cuda.memory_allocated(gpu)
    assert digest(tensor).blocks == (0,) * before + digest(end).blocks
    assert triton_digest.state(gpu) == "fused"
    assert torch.cuda.max_memory_allocated(gpu) - held < before * BLOCK_BYTES // 100  # no scratch of its size


def test_the_kernel_leaves_the_settings_alone(gpu: torch.device) -> None:
    with determinism.deterministic() as asked:
        digest(large().to(gpu))
        assert triton_digest.state(gpu) == "fused"
        assert determinism.changed(asked) == {}
