"""How each operation of torch rounds, which decides where `RoundingNoise` puts errors."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch._decomp import decomposition_table

from consistency.numerics.reduced_products import GROUPED, MATRIX_PRODUCTS

_aten = torch.ops.aten

_FACTORS: dict[Any, tuple[int, int]] = {**MATRIX_PRODUCTS, GROUPED: (0, 1)}
"""Matrix products, and where their two factors are among the arguments."""

_CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})

_IN_STEPS = frozenset({
    _aten.native_layer_norm.default, _aten.native_layer_norm_backward.default,
    _aten.native_group_norm.default, _aten.native_group_norm_backward.default,
    _aten.native_batch_norm.default, _aten.native_batch_norm_backward.default,
    _aten._native_batch_norm_legit_no_training.default,
    _aten._fused_rms_norm.default,
    _aten._softmax.default, _aten._softmax_backward_data.default,
    _aten._log_softmax.default, _aten._log_softmax_backward_data.default,
    _aten.logsumexp.default, _aten.linalg_vector_norm.default,
    # torch 2.8 computes the gradient of _fused_rms_norm by other operators
    *([_aten._fused_rms_norm_backward.default] if hasattr(_aten, "_fused_rms_norm_backward") else []),
})  # fmt: skip
"""Operations that torch computes at once, and other libraries in steps that round."""

_EXACT = frozenset({
    "alias", "clone", "contiguous", "detach", "lift", "lift_fresh", "set", "resize", "cat", "stack", "repeat",
    "repeat_interleave", "flip", "roll", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "pixel_shuffle",
    "pixel_unshuffle", "channel_shuffle", "im2col", "gather", "index", "index_select", "embedding", "take",
    "masked_select", "masked_fill", "masked_scatter", "where", "scatter", "index_fill", "index_copy", "slice_scatter",
    "select_scatter", "diagonal_scatter", "as_strided_scatter", "tril", "triu", "slice_backward", "select_backward",
    "diag_embed", "diagonal_backward", "unfold_backward", "split_with_sizes_copy", "zeros", "ones", "full", "empty",
    "arange", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_full", "new_empty", "new_empty_strided", "empty_strided", "scalar_tensor", "fill", "zero", "eye",
    "bernoulli", "uniform", "normal", "rand", "randn", "randint", "randperm", "_local_scalar_dense", "max", "min",
    "maximum", "minimum", "fmax", "fmin", "amax", "amin", "aminmax", "topk", "sort", "median", "nanmedian",
    "kthvalue", "mode", "cummax", "cummin", "clamp", "clamp_min", "clamp_max", "relu", "relu6", "hardtanh",
    "threshold", "threshold_backward", "hardtanh_backward", "abs", "neg", "sign", "sgn", "round", "floor", "ceil",
    "trunc", "heaviside", "floor_divide", "histc", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d",
})  # fmt: skip
"""Operations whose results are elements of their operands, or integers. One that is missing here is taken to round."""

_FUNCTIONS = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "silu", "silu_backward", "gelu", "gelu_backward",
    "mish", "mish_backward", "erf", "erfc", "erfinv", "pow", "rsqrt", "softplus", "softplus_backward", "elu",
    "elu_backward", "log_sigmoid_forward", "log_sigmoid_backward", "lgamma", "digamma", "logaddexp", "logaddexp2",
    "xlogy", "special_ndtr",
})  # fmt: skip

_ACCUMULATING = frozenset(
    {"scatter_add", "index_add", "index_put", "embedding_dense_backward", "scatter_reduce", "index_reduce"}
)
"""Operations that add the values that have the same index."""

_TRANSFORMS = frozenset({"_fft_r2c", "_fft_c2c", "_fft_c2r"})

_FACTORING = frozenset({
    "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "_linalg_eigh", "_linalg_eigvals",
    "linalg_eig", "linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_qr", "linalg_cholesky_ex",
    "linalg_lstsq", "linalg_ldl_factor_ex", "linalg_householder_product", "linalg_matrix_exp", "linalg_lu_solve",
    "linalg_solve_triangular", "triangular_solve", "cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "ormqr",
})  # fmt: skip

RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp"})

REDUCING = frozenset({"sum", "nansum", "mean", "nanmean", "prod", "var", "std", "var_mean", "std_mean"})
"""Operations that add along the dimensions of their second operand, or along all."""


class RoundingKind(enum.Enum):
    """How an operation rounds, which decides where noise is put."""

    EXACT = enum.auto()
    IN_STEPS = enum.auto()
    CAST = enum.auto()
    PRODUCT = enum.auto()
    CONVOLUTION = enum.auto()
    ACCUMULATION = enum.auto()
    SUM = enum.auto()
    FUNCTION = enum.auto()
    TRANSFORM = enum.auto()
    FACTORIZATION = enum.auto()
    WITH_MASKS = enum.auto()
    """Arithmetic by which masks of the smallest number are applied: noise must not make them minus infinity."""
    ROUNDING = enum.auto()
    """Any other operation: each element of its result is rounded once."""


_BY_NAME: dict[str, RoundingKind] = {
    **dict.fromkeys(_EXACT, RoundingKind.EXACT),
    **dict.fromkeys(("_to_copy", "to", "copy"), RoundingKind.CAST),
    **dict.fromkeys(_ACCUMULATING, RoundingKind.ACCUMULATION),
    **dict.fromkeys((*REDUCING, *RUNNING), RoundingKind.SUM),
    **dict.fromkeys(_FUNCTIONS, RoundingKind.FUNCTION),
    **dict.fromkeys(_TRANSFORMS, RoundingKind.TRANSFORM),
    **dict.fromkeys(_FACTORING, RoundingKind.FACTORIZATION),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div"), RoundingKind.WITH_MASKS),
}


class RoundingOperation:
    """The properties of an operation, looked up once: a pass of a small model takes most of its time to ask for them.

    Attributes
    ----------
    func : torch._ops.OpOverload
        The operation itself.
    name : str
        Name without the overload's, and without the underscore of an operation that writes in place.
    factors : tuple of int
        Where the two factors of a matrix product are among its arguments.
    is_mutable : bool
        Whether it writes in place.
    kind : RoundingKind
        How it rounds.
    is_for_several : bool
        Whether its noise is the same for several passes together as for each alone.
    """

    __slots__ = ("factors", "func", "is_for_several", "is_mutable", "kind", "name")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.name = str(func._schema.name.partition("::")[2].removesuffix("_"))
        self.factors = _FACTORS.get(func, (0, 1))
        self.is_mutable = bool(func._schema.is_mutable)
        self.kind = self._find_kind()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.is_for_several = not draws and (self.kind in _TOGETHER or func in _SOFTMAX)

    def _find_kind(self) -> RoundingKind:
        func = self.func
        if func.is_view:
            return RoundingKind.EXACT
        if func in _FACTORS:
            return RoundingKind.PRODUCT
        if func in _CONVOLUTIONS:
            return RoundingKind.CONVOLUTION
        if func in _IN_STEPS and func in decomposition_table:
            return RoundingKind.IN_STEPS
        kind = _BY_NAME.get(self.name)
        if kind is not None:
            return kind
        # a composite operation may return an operand as it is, so its parts are looked at instead
        if func._can_decompose():
            return RoundingKind.IN_STEPS
        return RoundingKind.ROUNDING


_SOFTMAX = frozenset({
    _aten._softmax.default, _aten._softmax_backward_data.default, _aten.logsumexp.default,
})  # fmt: skip
"""Operations in steps whose steps are the same with one more dimension of operands."""

_TOGETHER = frozenset({
    RoundingKind.EXACT, RoundingKind.CAST, RoundingKind.PRODUCT, RoundingKind.SUM, RoundingKind.FUNCTION,
    RoundingKind.WITH_MASKS, RoundingKind.ROUNDING,
})  # fmt: skip
"""Kinds of operations whose noise does not depend on how many passes are computed together."""


class NotTogetherError(RuntimeError):
    """An operation has another noise if several passes are computed together, as one more dimension of operands."""


_operations: dict[int, RoundingOperation] = {}
"""Operations by the identity of the function, which its `RoundingOperation` keeps alive: torch computes the hash of a
function in Python."""


def operation_of(func: Any) -> RoundingOperation:
    """Return the properties of an operation, which are looked up at its first call."""
    operation = _operations.get(id(func))
    if operation is None:
        operation = _operations[id(func)] = RoundingOperation(func)
    return operation


def check_together(operation: RoundingOperation) -> None:
    """Raise an error unless an operation has the same noise for each of several passes as for one alone."""
    if not operation.is_for_several:
        raise NotTogetherError(operation.name)
