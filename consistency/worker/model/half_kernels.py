"""Find out whether this processor has fast kernels of a half type, and replace slow ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from consistency.numerics.rounded_products import HALF, RoundedProducts
from consistency.worker import cpu_error

SLOW_PRODUCTS = 1 << 30
"""Multiplications from which slow kernels are replaced.

oneDNN without AVX-512, and the loops that torch falls back to, were measured at 50 million to 5 billion multiplications
per second and core, by layout and dtype; so fewer take seconds, and the processor's own kernels are run.
"""

_ISA = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_HALF = ("SSE41", "AVX", "AVX2", "AVX2_VNNI")
"""Values of `ONEDNN_MAX_CPU_ISA` with which oneDNN has no fast kernels of a half type."""


def is_fast(dtype: torch.dtype) -> bool:
    """Report whether the processor multiplies matrices of a half type by fast kernels."""
    if os.environ.get(_ISA, "").upper() in _WITHOUT_HALF:
        return False
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def replacement(model: torch.nn.Module, tokens: int) -> RoundedProducts | None:
    """Return the mode that replaces slow kernels of the model's dtype on the CPU; None where its own kernels are run.

    The choice depends on processor, model and inputs alone, so a result repeats.

    Parameters
    ----------
    tokens : int
        Rows that pass through the model at least once.
    """
    matrices = [
        parameter
        for parameter in model.parameters()
        if parameter.device.type == "cpu" and parameter.dtype in HALF and parameter.dim() > 1
    ]
    if not matrices or is_fast(matrices[0].dtype):
        return None
    multiplications = tokens * sum(matrix.numel() for matrix in matrices)
    return RoundedProducts() if multiplications > SLOW_PRODUCTS else None


@contextmanager
def computing(mode: RoundedProducts | None) -> Iterator[None]:
    """Compute by a mode of `replacement`, its float32 products by the same kernels whatever the settings are."""
    if mode is None:
        yield
        return
    with cpu_error.in_float32(), mode:
        yield


def evidence(mode: RoundedProducts | None) -> dict[str, str]:
    """Return the evidence on how the CPU's values were computed, for the rows; empty for its own kernels."""
    return {} if mode is None else {"computed_by": "float32 kernels, products rounded to the dtype"}
