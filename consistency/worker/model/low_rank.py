"""The closed form of a plain LoRA: its factors, from the files, and the allowed error of delta and merged weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from consistency.devices.products import Products
from consistency.numerics.bound import Allowance, UserAllowance, delta_allowance, merged_allowance
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.precision import Precision
from consistency.worker.model.adapter_settings import stated_scaling
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import has_quantized_weight
from consistency.worker.precision import products_of
from consistency.worker.recorder import UserTolerance

_QUANTIZED = ("Linear8bitLt", "Linear4bit", "TorchaoLoraLinear")
"""PEFT's classes of a LoRA on a quantized linear layer, which exist only where the library is installed."""

Expected = Mapping[str, tuple[str, torch.Tensor]]
"""An adapter's tensors in its file, on the CPU: parameter name to name in the file and tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The factors of a plain LoRA delta, from the file: `scaling * left @ right`, in the weight's own orientation.

    Attributes
    ----------
    left, right : torch.Tensor
        `(rows, rank)` and `(rank, columns)`, on the CPU, in the dtype of the adapter.
    adapter : torch.dtype
    rounds_delta : bool
        PEFT's code rounds the delta by itself before it is added.
    products : Products
        Products that the settings in force permit on this worker's device.
    """

    left: torch.Tensor
    right: torch.Tensor
    scaling: float
    adapter: torch.dtype
    rounds_delta: bool
    products: Products

    @property
    def rank(self) -> int:
        return int(self.right.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the delta."""
        return int(self.left.shape[0]), int(self.right.shape[1])


def low_rank_of(
    device: torch.device, name: str, layer: Any, expected: Expected, *, adapter: str = ADAPTER_NAME
) -> LowRank | None:
    """Return the factors of a plain LoRA on a linear, Conv1D, embedding or attention layer; None for all others.

    Parameters
    ----------
    name : str
        Name of the layer in the model.
    expected : mapping
        The adapter's tensors, in the form of `Context.expected`.
    """
    from peft.tuners.lora import layer as lora

    if getattr(layer, "lora_variant", {}).get(adapter) is not None:
        return None  # DoRA and its variants are no sum of a weight and a product
    is_quantized_linear = has_quantized_weight(layer) and type(layer).__name__ in _QUANTIZED
    # the projection of inputs of a MultiheadAttention is one matrix
    if is_quantized_linear or type(layer) in (lora.Linear, lora.MultiheadAttention):
        keys, is_transposed = ("lora_A.{}.weight", "lora_B.{}.weight"), bool(getattr(layer, "fan_in_fan_out", False))
    elif type(layer) is lora.Embedding:
        keys, is_transposed = ("lora_embedding_A.{}", "lora_embedding_B.{}"), True
    else:
        return None
    names = [f"{name}.{key.format(adapter)}" for key in keys]
    if not all(factor in expected for factor in names):
        return None
    state = dict(layer.named_parameters())
    dtype = state[keys[0].format(adapter)].dtype
    if dtype not in UNIT_ROUNDOFF:
        return None
    a, b = (expected[factor][1].to(dtype) for factor in names)
    left, right = (a.T, b.T) if is_transposed else (b, a)
    return LowRank(
        left=left,
        right=right,
        scaling=stated_scaling(layer, adapter),
        adapter=dtype,
        rounds_delta=type(layer) is not lora.Linear,
        products=products_of(device),
    )


def allowance_of(
    low_rank: LowRank, tolerance: UserTolerance | None, tensor: torch.Tensor, *, roundings: int, tf32: bool = False
) -> Allowance | UserAllowance:
    """Return the tolerance of a delta or of a merged weight.

    Parameters
    ----------
    tolerance : UserTolerance or None
        The user's, which is returned where there is one.
    tensor : torch.Tensor
        The delta or the merged weight, on its device.
    roundings : int
        Roundings of a merged weight to its dtype; 0 of a delta.
    tf32 : bool
        Allow for products in TF32, whatever the settings permit.
    """
    if tolerance is not None:
        return tolerance
    # bfloat16 and float16 products on an accelerator run on matrix units, which truncate when they accumulate
    on_matrix_units = tensor.device.type != "cpu"
    delta = delta_allowance(
        low_rank.rank,
        scaling=low_rank.scaling,
        adapter=low_rank.adapter,
        truncating=on_matrix_units and low_rank.adapter in (torch.bfloat16, torch.float16),
        products=Precision.TF32 if tf32 else low_rank.products.matmul,
        partial_terms=low_rank.products.partial_terms.get(name_of(low_rank.adapter)),
    )
    return merged_allowance(delta, weight=tensor.dtype, roundings=roundings) if roundings else delta
