"""In which precision a device may multiply float32, and add up products of half types, by the settings in force.

The rules of computed tensors follow it: what the settings permit is no fault of the device. No torch here.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from consistency.devices.backends import CPU
from consistency.devices.settings import UNREADABLE
from consistency.numerics.precision import SPLIT_TERMS, Precision

X86_64 = ("x86_64", "AMD64")
"""Names that `platform.machine` gives this architecture."""

_ORDER = tuple(Precision)
_ONEDNN = {"ieee": Precision.FLOAT32, "tf32": Precision.TF32, "bf16": Precision.BFLOAT16}
_BY_MATMUL_PRECISION = {"high": Precision.TF32, "medium": Precision.BFLOAT16}
_FPMATH = {"tf32": Precision.TF32, "bf16": Precision.BFLOAT16, "f16": Precision.BFLOAT16, "any": Precision.BFLOAT16}
"""Modes of oneDNN. float16 keeps more digits than bfloat16: that bound covers it where nothing overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """How products may be computed.

    Attributes
    ----------
    matmul, convolution : Precision
        Of float32 products.
    partial_terms : mapping of str to int
        Half types whose partial sums may be stored in that type instead of in float32, and the terms of each.
    """

    matmul: Precision = Precision.FLOAT32
    convolution: Precision = Precision.FLOAT32
    partial_terms: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_reduced(self) -> bool:
        """Return whether float32 products may be less precise than float32."""
        return self.matmul is not Precision.FLOAT32 or self.convolution is not Precision.FLOAT32


def permitted(kind: str, settings: Mapping[str, object], variables: Mapping[str, str]) -> Products:
    """Return what settings permit on a type of device, whether its units have such a mode or not.

    Parameters
    ----------
    kind : str
        Type of the device.
    settings : mapping
        Values in force, by the names of `SETTINGS`. Of a switch of TF32 that torch refuses to read it is not known
        that it is off.
    variables : mapping
        Further environment variables that libraries follow.
    """
    by_name = _BY_MATMUL_PRECISION.get(str(settings.get("float32_matmul_precision")), Precision.FLOAT32)
    if kind == CPU:
        mode = variables.get("ONEDNN_DEFAULT_FPMATH_MODE", variables.get("DNNL_DEFAULT_FPMATH_MODE", "")).lower()
        default = _FPMATH.get(mode, Precision.FLOAT32)
        found = _ONEDNN.get(str(settings.get("mkldnn_matmul_fp32_precision")), by_name)  # an older torch has one switch
        convolution = _ONEDNN.get(str(settings.get("mkldnn_conv_fp32_precision")), Precision.FLOAT32)
        # on x86 MKL multiplies matrices, unless torch's own setting chooses oneDNN; its variable reaches convolutions
        matmul = found if platform.machine() in X86_64 else _least(found, default)
        return Products(matmul=matmul, convolution=_least(convolution, default))
    partial = {
        dtype: SPLIT_TERMS
        for dtype, name in (
            ("float16", "fp16_reduced_precision_reduction"),
            ("bfloat16", "bf16_reduced_precision_reduction"),
        )
        if settings.get(name) is True
    }
    if settings.get("fp16_accumulation") is True:
        partial["float16"] = 1
    if kind != "cuda":
        found = _least(by_name, _ONEDNN.get(str(settings.get("mkldnn_matmul_fp32_precision")), Precision.FLOAT32))
        convolution = _ONEDNN.get(str(settings.get("mkldnn_conv_fp32_precision")), Precision.FLOAT32)
        return Products(matmul=found, convolution=convolution, partial_terms=partial)
    override = settings.get("nvidia_tf32_override")
    if override == "0":
        return Products(partial_terms=partial)
    # CUDA has no bfloat16 mode for float32: `medium` is TF32 there
    tf32 = override == "1" or by_name is not Precision.FLOAT32 or _in_tf32(settings, "matmul")
    in_cudnn = tf32 if settings.get("cudnn_enabled") is False else _in_tf32(settings, "conv")
    in_cudnn = in_cudnn or override == "1"
    return Products(
        matmul=Precision.TF32 if tf32 else Precision.FLOAT32,
        convolution=Precision.TF32 if in_cudnn else Precision.FLOAT32,
        partial_terms=partial,
    )


def _least(*found: Precision) -> Precision:
    """Return the least precise."""
    return max(found, key=_ORDER.index)


_SWITCHES = {
    "matmul": ("matmul_allow_tf32", "cuda_matmul_fp32_precision"),
    "conv": ("cudnn_allow_tf32", "cudnn_conv_fp32_precision"),
}


def _in_tf32(settings: Mapping[str, object], kind: str) -> bool:
    """Return whether either of torch's two switches lets a kind of product run in TF32, or cannot be read."""
    older, newer = (settings.get(name) for name in _SWITCHES[kind])
    return older is True or str(older).startswith(UNREADABLE) or newer == "tf32"
