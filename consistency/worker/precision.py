"""The precision in which this process may multiply on a device: as its settings permit, as far as the units have it."""

from __future__ import annotations

import os
import platform
from dataclasses import replace

import torch

from consistency.devices.backends import CPU
from consistency.devices.products import X86_64, Products, permitted
from consistency.numerics.precision import Precision
from consistency.worker import determinism

_WITHOUT_TILES = frozenset(
    {
        "SSE41",
        "AVX",
        "AVX2",
        "AVX2_VNNI",
        "AVX2_VNNI_2",
        "AVX512_CORE",
        "AVX512_CORE_VNNI",
        "AVX512_CORE_BF16",
        "AVX512_CORE_FP16",
        "AVX10_1_512",
    }
)
"""Values of `ONEDNN_MAX_CPU_ISA` that leave out AMX."""

_AMPERE = (8, 0)
"""Compute capability from which on a GPU has TF32."""


def products_of(device: torch.device) -> Products:
    """Return the products by which a device of this process may compute, by its settings."""
    products = permitted(device.type, *determinism.settings_to_judge_by())
    if device.type == CPU:
        return _on_cpu(products)
    return _on_cuda(products, device) if device.type == "cuda" else products


def _on_cpu(products: Products) -> Products:
    """Return permitted products, with float32 where this processor has no units for less."""

    def possible(precision: Precision) -> Precision:
        # torch's own condition: oneDNN's mode is for units that multiply float16
        if precision is Precision.TF32 and not getattr(torch.cpu, "_is_amx_fp16_supported", bool)():
            return Precision.FLOAT32
        if precision is Precision.BFLOAT16 and not _multiplies_bfloat16():
            return Precision.FLOAT32
        return precision

    return replace(products, matmul=possible(products.matmul), convolution=possible(products.convolution))


def _multiplies_bfloat16() -> bool:
    """Return whether oneDNN has kernels that multiply float32 as bfloat16 on this processor.

    On x86-64 they are those of AMX (`maybe_try_bf32` in oneDNN's `brgemm_utils.cpp`); AVX512-BF16 alone has none.
    Measured with torch 2.13 (oneDNN 3.12), `medium`, 64x64x64: an error of 1.2e-3 with AMX, 4e-7 on the same processor
    without it, and on an AMD EPYC with AVX512-BF16 the error of `highest`, 1e-5 for operands of another scale.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine() in X86_64:
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
        return isa not in _WITHOUT_TILES and getattr(torch.cpu, "_is_amx_tile_supported", _unknown)()
    return getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", _unknown)()


def _unknown() -> bool:
    """Stand for a question that this torch cannot answer: the wider tolerance is the one without false alarms."""
    return True


def _on_cuda(products: Products, device: torch.device) -> Products:
    """Return permitted products, with float32 where this GPU has no units for less."""
    if products.is_reduced and torch.version.hip is None and torch.cuda.get_device_capability(device) < _AMPERE:
        return Products(partial_terms=products.partial_terms)
    return products
