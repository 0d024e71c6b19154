"""What settings permit: a rule that allows more misses faults, one that allows less raises false alarms."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from consistency.devices.products import Products, permitted
from consistency.devices.settings import SETTINGS
from consistency.numerics.precision import Precision

PINNED: dict[str, Any] = {name: spec.pinned for name, spec in SETTINGS.items()}
FLOAT32, TF32, BFLOAT16 = Precision


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", "npu", "mps"])
def test_the_pinned_profile_permits_float32_alone(kind: str) -> None:
    assert permitted(kind, PINNED, {}) == Products()
    assert not Products().is_reduced


@pytest.mark.parametrize(
    ("kind", "settings", "variables", "matmul", "convolution"),
    [
        ("cuda", {"float32_matmul_precision": "high"}, {}, TF32, FLOAT32),
        ("cuda", {"float32_matmul_precision": "medium"}, {}, TF32, FLOAT32),
        ("cuda", {"matmul_allow_tf32": True}, {}, TF32, FLOAT32),
        ("cuda", {"cudnn_allow_tf32": True}, {}, FLOAT32, TF32),
        ("cuda", {"cudnn_allow_tf32": True, "cudnn_enabled": False}, {}, FLOAT32, FLOAT32),
        ("cuda", {"matmul_allow_tf32": True, "cudnn_enabled": False}, {}, TF32, TF32),
        ("cuda", {"nvidia_tf32_override": "1"}, {}, TF32, TF32),
        ("cuda", {"matmul_allow_tf32": True, "nvidia_tf32_override": "0"}, {}, FLOAT32, FLOAT32),
        ("cuda", {"cudnn_allow_tf32": True, "nvidia_tf32_override": "0"}, {}, FLOAT32, FLOAT32),
        ("cuda", {"matmul_allow_tf32": "unreadable: mixed"}, {}, TF32, FLOAT32),
        ("cuda", {"matmul_allow_tf32": False, "cuda_matmul_fp32_precision": "tf32"}, {}, TF32, FLOAT32),
        ("cuda", {"cudnn_allow_tf32": False, "cudnn_conv_fp32_precision": "tf32"}, {}, FLOAT32, TF32),
        ("cuda", {"cudnn_rnn_fp32_precision": "tf32", "fp32_precision": "tf32"}, {}, FLOAT32, FLOAT32),
        ("cuda", {"mkldnn_matmul_fp32_precision": "bf16"}, {}, FLOAT32, FLOAT32),
        ("cuda", {}, {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}, FLOAT32, FLOAT32),
        ("cpu", {"matmul_allow_tf32": True, "nvidia_tf32_override": "1"}, {}, FLOAT32, FLOAT32),
        ("cpu", {"mkldnn_matmul_fp32_precision": "bf16"}, {}, BFLOAT16, FLOAT32),
        ("cpu", {"mkldnn_matmul_fp32_precision": "none"}, {}, FLOAT32, FLOAT32),
        ("cpu", {"mkldnn_conv_fp32_precision": "tf32"}, {}, FLOAT32, TF32),
        (
            "cpu", {"mkldnn_matmul_fp32_precision": "unreadable", "float32_matmul_precision": "medium"}, {},
            BFLOAT16, FLOAT32,
        ),
        ("cpu", {}, {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}, FLOAT32, BFLOAT16),
        ("cpu", {}, {"DNNL_DEFAULT_FPMATH_MODE": "tf32"}, FLOAT32, TF32),
        ("cpu", {}, {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}, FLOAT32, FLOAT32),
        ("xpu", {"float32_matmul_precision": "medium"}, {}, BFLOAT16, FLOAT32),
        ("xpu", {"mkldnn_conv_fp32_precision": "bf16"}, {}, FLOAT32, BFLOAT16),
        ("npu", {"float32_matmul_precision": "high"}, {}, TF32, FLOAT32),
    ],
)  # fmt: skip
def test_each_switch_permits_its_own_products(
    kind: str,
    settings: dict[str, Any],
    variables: dict[str, str],
    matmul: Precision,
    convolution: Precision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    found = permitted(kind, PINNED | settings, variables)
    assert found == Products(matmul=matmul, convolution=convolution)
    assert found.is_reduced == ({matmul, convolution} != {FLOAT32})


def test_onednn_s_variable_reaches_matrices_where_it_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on x86 with AMX: 8e-7 in a matrix product, 5e-4 in a convolution; on Arm oneDNN does both."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    found = permitted("cpu", PINNED, {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"})
    assert found == Products(matmul=BFLOAT16, convolution=BFLOAT16)


def test_partial_sums_of_half_types_are_the_accelerators() -> None:
    settings = PINNED | {"fp16_reduced_precision_reduction": True, "bf16_reduced_precision_reduction": True}
    assert permitted("cuda", settings, {}).partial_terms == {"float16": 32, "bfloat16": 32}
    assert permitted("cuda", settings | {"fp16_accumulation": True}, {}).partial_terms == {"float16": 1, "bfloat16": 32}
    assert permitted("cpu", settings, {}).partial_terms == {}
