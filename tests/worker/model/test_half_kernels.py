"""When slow kernels of a half type are replaced."""

from __future__ import annotations

import pytest
import torch

from consistency.numerics.rounded_products import RoundedProducts
from consistency.worker.model import half_kernels

ISA = "ONEDNN_MAX_CPU_ISA"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA, "AVX2")


def linear(dtype: torch.dtype, features: int = 4096) -> torch.nn.Module:
    with torch.device("meta"):
        weight = torch.nn.Linear(features, features, bias=False, dtype=dtype)
    # as large as it says, without the memory
    weight.weight = torch.nn.Parameter(torch.empty(1, dtype=dtype).expand(features, features))
    return weight


@pytest.mark.usefixtures("slow")
def test_large_products_of_slow_kernels_are_replaced() -> None:
    found = half_kernels.replacement(linear(torch.bfloat16), tokens=128)
    assert isinstance(found, RoundedProducts)
    assert half_kernels.evidence(found) == {"computed_by": "float32 kernels, products rounded to the dtype"}
    assert half_kernels.replacement(linear(torch.float16), tokens=128) is not None


@pytest.mark.usefixtures("slow")
def test_small_ones_and_those_of_float32_are_not() -> None:
    assert half_kernels.replacement(linear(torch.bfloat16, 64), tokens=128) is None
    assert half_kernels.replacement(linear(torch.bfloat16), tokens=16) is None
    assert half_kernels.replacement(linear(torch.float32), tokens=128) is None
    assert half_kernels.evidence(None) == {}
    with half_kernels.computing(None):
        pass


def test_their_float32_products_are_in_float32_whatever_the_settings_permit() -> None:
    x, weight = torch.randn(64, 512).bfloat16(), torch.randn(512, 512).bfloat16()
    with half_kernels.computing(RoundedProducts()):
        expected = x @ weight
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with half_kernels.computing(RoundedProducts()):
            found = x @ weight
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found, expected)


def test_fast_kernels_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    assert half_kernels.replacement(linear(torch.bfloat16), tokens=128) is None
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    assert half_kernels.replacement(linear(torch.bfloat16), tokens=128) is not None


def test_a_torch_without_onednn_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise RuntimeError("no such operator")

    monkeypatch.delenv(ISA, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", refuse, raising=False)
    assert not half_kernels.is_fast(torch.float16)
