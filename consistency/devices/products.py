"""The precision in which a device may multiply float32, and add up products of half types, by the settings in force.

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

_ORDER = tuple(Precision)  # from the most precise to the least
_ONEDNN = {"ieee": Precision.FLOAT32, "tf32": Precision.TF32, "bf16": Precision.BFLOAT16}
_BY_MATMUL_PRECISION = {"high": Precision.TF32, "medium": Precision.BFLOAT16}
_FPMATH = {"tf32": Precision.TF32, "bf16": Precision.BFLOAT16, "f16": Precision.BFLOAT16, "any": Precision.BFLOAT16}
"""Precision of each mode of oneDNN. float16 keeps more digits than bfloat16: that bound covers it where nothing
overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The precision in which products may be computed.

    Attributes
    ----------
    matmul, convolution : Precision
        Precision of float32 products in matrix products and in convolutions.
    partial_terms : mapping of str to int
        Number of terms in a partial sum, by the half type that may store it in place of float32.
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
        Values in force, by the names of `SETTINGS`. A switch of TF32 that torch refuses to read counts as on.
    variables : mapping
        Further environment variables that libraries follow.
    """
    if kind == CPU:
        return _on_cpu(settings, variables)
    partial_terms = _partial_terms(settings)
    if kind == "cuda":
        return _on_cuda(settings, partial_terms)
    default = _BY_MATMUL_PRECISION.get(str(settings.get("float32_matmul_precision")), Precision.FLOAT32)
    return Products(
        matmul=_least(default, _onednn_precision(settings, "mkldnn_matmul_fp32_precision", Precision.FLOAT32)),
        convolution=_onednn_precision(settings, "mkldnn_conv_fp32_precision", Precision.FLOAT32),
        partial_terms=partial_terms,
    )


def _on_cpu(settings: Mapping[str, object], variables: Mapping[str, str]) -> Products:
    """Return what settings permit on the host's processor."""
    mode = variables.get("ONEDNN_DEFAULT_FPMATH_MODE", variables.get("DNNL_DEFAULT_FPMATH_MODE", "")).lower()
    library_default = _FPMATH.get(mode, Precision.FLOAT32)
    # an older torch has one switch for all backends
    older = _BY_MATMUL_PRECISION.get(str(settings.get("float32_matmul_precision")), Precision.FLOAT32)
    matmul = _onednn_precision(settings, "mkldnn_matmul_fp32_precision", older)
    convolution = _onednn_precision(settings, "mkldnn_conv_fp32_precision", Precision.FLOAT32)
    # on x86 MKL multiplies matrices, unless torch's own setting chooses oneDNN; its variable reaches convolutions
    if platform.machine() not in X86_64:
        matmul = _least(matmul, library_default)
    return Products(matmul=matmul, convolution=_least(convolution, library_default))


def _on_cuda(settings: Mapping[str, object], partial_terms: Mapping[str, int]) -> Products:
    """Return what settings permit on a device of the type `cuda`."""
    override = settings.get("nvidia_tf32_override")
    if override == "0":
        return Products(partial_terms=partial_terms)
    # CUDA has no bfloat16 mode for float32: `medium` is TF32 there
    by_precision = str(settings.get("float32_matmul_precision")) in _BY_MATMUL_PRECISION
    matmul_tf32 = override == "1" or by_precision or _in_tf32(settings, "matmul")
    if settings.get("cudnn_enabled") is False:
        convolution_tf32 = matmul_tf32
    else:
        convolution_tf32 = override == "1" or _in_tf32(settings, "conv")
    return Products(
        matmul=Precision.TF32 if matmul_tf32 else Precision.FLOAT32,
        convolution=Precision.TF32 if convolution_tf32 else Precision.FLOAT32,
        partial_terms=partial_terms,
    )


def _partial_terms(settings: Mapping[str, object]) -> dict[str, int]:
    """Return `Products.partial_terms` of an accelerator."""
    terms: dict[str, int] = {}
    if settings.get("fp16_reduced_precision_reduction") is True:
        terms["float16"] = SPLIT_TERMS
    if settings.get("bf16_reduced_precision_reduction") is True:
        terms["bfloat16"] = SPLIT_TERMS
    if settings.get("fp16_accumulation") is True:
        terms["float16"] = 1
    return terms


def _onednn_precision(settings: Mapping[str, object], name: str, default: Precision) -> Precision:
    """Return the precision that one of torch's settings of oneDNN chooses; the default where it chooses none."""
    return _ONEDNN.get(str(settings.get(name)), default)


def _least(*precisions: Precision) -> Precision:
    """Return the least precise of some precisions."""
    return max(precisions, key=_ORDER.index)


# the older and the newer switch of torch for each kind of product
_SWITCHES = {
    "matmul": ("matmul_allow_tf32", "cuda_matmul_fp32_precision"),
    "conv": ("cudnn_allow_tf32", "cudnn_conv_fp32_precision"),
}


def _in_tf32(settings: Mapping[str, object], kind: str) -> bool:
    """Return whether either of torch's two switches lets a kind of product run in TF32, or cannot be read."""
    older, newer = (settings.get(name) for name in _SWITCHES[kind])
    return older is True or str(older).startswith(UNREADABLE) or newer == "tf32"
