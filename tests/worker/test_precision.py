"""What products a process may compute: the settings in force, as far as the units have the mode."""

from __future__ import annotations

import platform

import pytest
import torch

from consistency.devices.products import Products
from consistency.numerics.precision import Precision
from consistency.worker.determinism import deterministic
from consistency.worker.environment import describe, products, release
from consistency.worker.precision import products_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _with_bfloat16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    _units(monkeypatch, "x86_64", tiles=True, bfloat16=True)


def _units(monkeypatch: pytest.MonkeyPatch, machine: str, *, tiles: bool, bfloat16: bool) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bfloat16)


def test_pinned_products_are_float32_and_no_line_says_so() -> None:
    with deterministic(threads=1):
        assert products_of(CPU) == Products()
        assert products(CPU) == {}
        assert "products" not in describe(CPU)


@pytest.mark.usefixtures("_with_bfloat16_units")
def test_medium_is_bfloat16_on_a_processor_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with deterministic(threads=1, float32_matmul_precision="medium"):
        assert products_of(CPU) == Products(matmul=Precision.BFLOAT16)
        assert describe(CPU)["products"] == {"matmul": "bfloat16"}
        for isa in ("avx2", "AVX512_CORE_BF16", "AVX512_CORE_FP16"):
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
            assert products_of(CPU) == Products(), isa
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
        assert products_of(CPU).matmul is Precision.BFLOAT16


@pytest.mark.parametrize(
    ("machine", "tiles", "bfloat16", "precision"),
    [
        pytest.param("x86_64", False, True, Precision.FLOAT32, id="AVX512-BF16 without AMX"),
        pytest.param("AMD64", True, True, Precision.BFLOAT16, id="AMX, under Windows"),
        pytest.param("aarch64", False, True, Precision.BFLOAT16, id="Arm with bfloat16"),
        pytest.param("aarch64", False, False, Precision.FLOAT32, id="Arm without"),
    ],
)
def test_medium_is_bfloat16_only_on_units_that_onednn_uses_for_it(
    machine: str, tiles: bool, bfloat16: bool, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    _units(monkeypatch, machine, tiles=tiles, bfloat16=bfloat16)
    with deterministic(threads=1, float32_matmul_precision="medium"):
        assert products_of(CPU).matmul is precision


@pytest.mark.parametrize("size", [16, 64, 256, 1024])
def test_this_processor_multiplies_as_is_said_of_it(size: int) -> None:
    """A value of eleven binary digits times one is itself, unless its last digits are cut off first."""
    digits = 1 + 2.0**-10 * (torch.arange(size * size) % 1024).view(size, size)
    with deterministic(threads=1, float32_matmul_precision="medium"):
        cut = not torch.equal(digits @ torch.eye(size), digits)
        assert not cut or products_of(CPU).matmul is Precision.BFLOAT16


@pytest.mark.skipif(release("torch") < (2, 9), reason="torch 2.9 is the first with precisions of oneDNN's own")
def test_high_is_tf32_where_torch_has_a_unit_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with deterministic(threads=1, float32_matmul_precision="high", mkldnn_conv_fp32_precision="tf32"):
        monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: False, raising=False)
        assert products_of(CPU) == Products()
        monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: True, raising=False)
        assert products_of(CPU) == Products(matmul=Precision.TF32, convolution=Precision.TF32)


@pytest.mark.parametrize(("capability", "precision"), [((8, 0), Precision.TF32), ((7, 5), Precision.FLOAT32)])
def test_tf32_is_of_ampere_and_later(
    capability: tuple[int, int], precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with deterministic(threads=1, float32_matmul_precision="high"):
        assert products_of(torch.device("cuda:0")).matmul is precision


@pytest.mark.usefixtures("_with_bfloat16_units")
def test_what_a_library_changes_against_a_request_is_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with deterministic(threads=1):
        torch.set_float32_matmul_precision("medium")
        monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        assert products_of(CPU) == Products(), "pinned: results in bfloat16 are a finding"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with deterministic(pins=False):
        torch.set_float32_matmul_precision("medium")
        assert products_of(CPU) == Products(matmul=Precision.BFLOAT16, convolution=Precision.BFLOAT16)
        torch.set_float32_matmul_precision("highest")
    with deterministic(pins=False, float32_matmul_precision="highest"):
        monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE")
        torch.set_float32_matmul_precision("medium")
        assert products_of(CPU) == Products(), "chosen with --set"


def test_nothing_is_asked_of_a_device_whose_settings_permit_nothing() -> None:
    """A pinned worker must not open a device to learn its capability."""
    with deterministic(threads=1):
        assert products_of(torch.device("cuda:0")) == Products()
