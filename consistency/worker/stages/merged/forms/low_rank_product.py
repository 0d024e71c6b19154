r"""The product of a LoRA's two factors in any layer, :math:`s\,B A` in the weight's own orientation and order.

On a CPU PEFT multiplies half types in float32, multiplies by the scaling and rounds once; elsewhere product and
scaled product are rounded each. With rank K the error is at most
:math:`|s| (\gamma_K |B||A| + \dots)`, and one rounding each for scaling and store.

A convolution's factors are convolved: A moves the kernel, B is a kernel of one point, so that each element is an inner
product of K terms, too, in the precision of convolutions; if A is of one point itself, PEFT multiplies matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consistency.numerics.typed import ArithmeticOf, Typed
from consistency.worker.stages.merged.forms.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankFactors:
    """Factors `(rows, rank)` and `(rank, columns)`, and how the device multiplies them."""

    left: Typed
    right: Typed
    scaling: float
    arithmetic: ArithmeticOf
    computed_in: torch.dtype
    dtype: torch.dtype
    """`computed_in`, `dtype`: of the product, and of the delta that PEFT gives."""

    def delta(self, rows: slice) -> Typed:
        """Return rows of the scaled product."""
        left, right = (one.to(self.computed_in) for one in (self.left.moved(lambda b: b[rows]), self.right))
        return left.matmul(right, self.arithmetic).scaled(self.scaling).to(self.dtype)


def factors(source: Source, left: torch.Tensor, right: torch.Tensor, arithmetic: ArithmeticOf) -> LowRankFactors:
    """Return the factors of a delta that PEFT computes as all LoRA layers do."""
    return LowRankFactors(
        left=Typed.known(left),
        right=Typed.known(right),
        scaling=source.lora_scaling(),
        arithmetic=arithmetic,
        computed_in=source.computed_in(left.dtype),
        dtype=left.dtype,
    )


def of_linear(source: Source) -> LowRankFactors | None:
    """Return the factors of a linear layer, which may store its weight as (in, out)."""
    a, b = source.tensor("lora_A"), source.tensor("lora_B")
    if a is None or b is None:
        return None
    transposed = bool(getattr(source.layer, "fan_in_fan_out", False))
    return factors(source, a.T if transposed else b, b.T if transposed else a, source.matmul)


def of_embedding(source: Source) -> LowRankFactors | None:
    """Return the factors of an embedding, whose weight is (tokens, features)."""
    a, b = source.tensor("lora_embedding_A"), source.tensor("lora_embedding_B")
    return None if a is None or b is None else factors(source, a.T, b.T, source.matmul)


def of_convolution(source: Source) -> LowRankFactors | None:
    """Return the factors of a convolution without groups, its weight flat: (out, in times kernel).

    Of a convolution with groups PEFT gives no delta, and merges none.
    """
    a, b = source.tensor("lora_A"), source.tensor("lora_B")
    if a is None or b is None or int(source.layer.get_base_layer().groups) != 1:
        return None
    point = source.weight.dim() == 4 and source.weight.shape[2:] == (1, 1)
    rank = a.shape[0]
    flat = a.transpose(0, 1).reshape(a.shape[1], rank, -1).transpose(0, 1).reshape(rank, -1)
    return factors(source, b.reshape(-1, rank), flat, source.matmul if point else source.convolution)
