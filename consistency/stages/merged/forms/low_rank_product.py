r"""The product of a LoRA's two factors in any layer, :math:`s\,B A` in the weight's own orientation and order.

On a CPU PEFT multiplies half types in float32, multiplies by the scaling and rounds once; elsewhere product and
scaled product are rounded each. With rank K the error is at most
:math:`|s| (\gamma_K |B||A| + \dots)`, and one rounding each for scaling and store.

A convolution's factors are convolved: A moves the kernel, B is a kernel of one point, so that each element is an inner
product of K terms, too, in the precision of convolutions; if A is of one point itself, PEFT multiplies matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics.typed import ArithmeticOf, Typed
from consistency.stages.merged.forms.form import AddedForm
from consistency.stages.merged.forms.source import Source
from consistency.worker.environment import release


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankFactors:
    """Factors `(rows, rank)` and `(rank, columns)`, and how the device multiplies them."""

    left: Typed
    right: Typed
    scaling: float
    arithmetic: ArithmeticOf
    computed_in: torch.dtype
    """The dtype in which the product is computed."""
    dtype: torch.dtype
    """The dtype of the delta that PEFT gives."""

    def delta(self, rows: slice) -> Typed:
        """Return rows of the scaled product."""
        left = self.left.moved(lambda b: b[rows]).to(self.computed_in)
        right = self.right.to(self.computed_in)
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
    if getattr(source.layer, "fan_in_fan_out", False):
        return factors(source, a.T, b.T, source.matmul)
    return factors(source, b, a, source.matmul)


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
    rank = a.shape[0]
    flat = a.transpose(0, 1).reshape(a.shape[1], rank, -1).transpose(0, 1).reshape(rank, -1)
    is_point = source.weight.dim() == 4 and source.weight.shape[2:] == (1, 1)
    arithmetic = source.matmul if is_point else source.convolution
    return factors(source, b.reshape(-1, rank), flat, arithmetic)


class LoraConvolution(AddedForm):
    """The delta of a LoRA on a convolution.

    A safe merge rounds it to the weight's dtype first, and before PEFT 0.20 any merge.
    """

    rounds_delta = (release("peft") < (0, 20), True)

    def __init__(self, source: Source, factors: LowRankFactors) -> None:
        super().__init__(source.weight)
        self._factors = factors

    @classmethod
    def of(cls, source: Source) -> LoraConvolution | None:
        """Return the form of a layer without groups."""
        factors = of_convolution(source)
        return None if factors is None else cls(source, factors)

    def delta(self, rows: slice) -> Typed:
        """Return rows of the scaled product, `(n, in times kernel)`."""
        return self._factors.delta(rows)


class OneParameter(AddedForm):
    """The delta of a parameter that is a matrix."""

    def __init__(self, source: Source, factors: LowRankFactors) -> None:
        super().__init__(source.weight)
        self._factors = factors

    def delta(self, rows: slice) -> Typed:
        """Return rows of the scaled product, rounded to the dtype of the parameter."""
        return self._factors.delta(rows).to(self.weight.dtype)


class Experts(AddedForm):
    """The delta of a stack of matrices, (experts, rows, columns), streamed row by row through all experts."""

    def __init__(self, source: Source, left: torch.Tensor, right: torch.Tensor) -> None:
        experts, height = source.weight.shape[:2]
        super().__init__(source.weight, rows=experts * height)
        self._height = height
        self._experts = tuple(
            LowRankFactors(
                left=Typed.known(expert_left),
                right=Typed.known(expert_right),
                scaling=source.lora_scaling(),
                arithmetic=source.matmul,
                computed_in=left.dtype,
                dtype=left.dtype,
            )
            for expert_left, expert_right in zip(left, right, strict=True)
        )

    def delta(self, rows: slice) -> Typed:
        """Return rows of the stack, which may belong to several experts, rounded to the dtype of the parameter."""
        of_experts = []
        start = rows.start
        while start < rows.stop:
            expert, row = divmod(start, self._height)
            stop = min(rows.stop, (expert + 1) * self._height)
            delta = self._experts[expert].delta(slice(row, row + stop - start))
            of_experts.append(delta.to(self.weight.dtype))
            start = stop
        value = np.concatenate([delta.value for delta in of_experts])
        error = np.concatenate([delta.error for delta in of_experts])
        return Typed(value=value, error=error, dtype=self.weight.dtype)


def of_experts(source: Source) -> AddedForm | None:
    """Return the form of a parameter of two or three dimensions, such as the experts of a mixture.

    PEFT keeps the factors of all experts in two matrices: A, (experts · rank, in), expert by expert, and B,
    (out, rank · experts), in which the expert is the faster index. It multiplies them in the dtype of the adapter, one
    inner product of K terms per element, multiplies by the scaling, and rounds the delta to the dtype of the parameter
    before it is added or given.
    """
    if source.weight.dim() == 2:
        of_matrix = of_linear(source)
        return None if of_matrix is None else OneParameter(source, of_matrix)
    factors = factors_of_experts(source)
    return None if factors is None else Experts(source, *factors)


def factors_of_experts(source: Source) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the factors of a stack, `(experts, rows, rank)` and `(experts, rank, columns)`, if they fit the weight."""
    a, b, weight = source.tensor("lora_A"), source.tensor("lora_B"), source.weight
    if a is None or b is None:
        return None
    experts = weight.shape[0]
    if weight.dim() != 3 or experts == 1:
        return None
    inner = a.reshape(experts, -1, a.shape[-1])  # (experts, rank, in)
    outer = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)  # (experts, out, rank)
    # before version 0.19 PEFT takes each stack as (experts, in, out), and its layer has no such attribute
    may_swap = hasattr(source.layer, "_did_swap_in_out_features")
    is_transposed = getattr(source.layer.get_base_layer(), "is_transposed", False)
    if is_transposed or not may_swap:  # the weight is (experts, in, out)
        outer, inner = inner.transpose(1, 2), outer.transpose(1, 2)
    return (outer, inner) if weight.shape == (experts, outer.shape[1], inner.shape[2]) else None
