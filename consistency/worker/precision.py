"""In which precision this process may multiply on a device: what its settings permit, as far as the units have it."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from consistency.devices.backends import CPU
from consistency.devices.products import Products, permitted
from consistency.numerics.precision import Precision
from consistency.worker import determinism

_WITHOUT_BFLOAT16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""Values of `ONEDNN_MAX_CPU_ISA` under which oneDNN multiplies float32 as float32, whatever its mode.

Measured with torch 2.13 (oneDNN 3.12) on a processor with AMX, `medium`, 64x64x64: an error of 1.2e-3 with AMX kernels,
4e-7 with each of these.
"""

_AMPERE = (8, 0)


def products_of(device: torch.device) -> Products:
    """Return how products may be computed on a device of this process, by its settings."""
    found = permitted(device.type, *determinism.meant())
    if device.type == CPU:
        return _on_cpu(found)
    return _on_cuda(found, device) if device.type == "cuda" else found


def _on_cpu(found: Products) -> Products:
    def possible(precision: Precision) -> Precision:
        # torch's own condition: oneDNN's mode is for units that multiply float16
        if precision is Precision.TF32 and not getattr(torch.cpu, "_is_amx_fp16_supported", bool)():
            return Precision.FLOAT32
        if precision is Precision.BFLOAT16 and not _multiplies_bfloat16():
            return Precision.FLOAT32
        return precision

    return replace(found, matmul=possible(found.matmul), convolution=possible(found.convolution))


def _multiplies_bfloat16() -> bool:
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return isa not in _WITHOUT_BFLOAT16 and torch.backends.mkldnn.is_available() and (supported is None or supported())


def _on_cuda(found: Products, device: torch.device) -> Products:
    if found.is_reduced and torch.version.hip is None and torch.cuda.get_device_capability(device) < _AMPERE:
        return Products(partial_terms=found.partial_terms)
    return found
