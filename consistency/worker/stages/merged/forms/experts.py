r"""LoRA on a parameter, such as the experts of a mixture: :math:`\Delta_e = s\,B_e A_e` for each expert.

PEFT keeps the factors of all experts in two matrices: A, (experts · rank, in), expert by expert, and B,
(out, rank · experts), in which the expert is the faster index. It multiplies them in the dtype of the adapter, one
inner product of K terms per element, multiplies by the scaling, and rounds the delta to the dtype of the parameter
before it is added or given. One matrix is a linear layer's (`low_rank_product`).
"""

from __future__ import annotations

import numpy as np
import torch

from consistency.numerics.typed import Typed
from consistency.worker.stages.merged.forms.form import AddedForm
from consistency.worker.stages.merged.forms.low_rank_product import LowRankFactors, of_linear
from consistency.worker.stages.merged.forms.source import Source


class OneParameter(AddedForm):
    """The delta of a matrix."""

    def __init__(self, source: Source, of: LowRankFactors) -> None:
        super().__init__(source.weight)
        self._factors = of

    def delta(self, rows: slice) -> Typed:
        return self._factors.delta(rows).to(self.weight.dtype)


class Experts(AddedForm):
    """The delta of a stack of matrices, (experts, rows, columns), streamed row by row through all experts."""

    def __init__(self, source: Source, left: torch.Tensor, right: torch.Tensor) -> None:
        experts, height = source.weight.shape[:2]
        super().__init__(source.weight, rows=experts * height)
        self._height = height
        each = (
            LowRankFactors(
                left=Typed.known(one), right=Typed.known(other), scaling=source.lora_scaling(),
                arithmetic=source.matmul, computed_in=left.dtype, dtype=left.dtype,
            )
            for one, other in zip(left, right, strict=True)
        )  # fmt: skip
        self._experts = tuple(each)

    def delta(self, rows: slice) -> Typed:
        parts = []
        start = rows.start
        while start < rows.stop:
            expert, row = divmod(start, self._height)
            stop = min(rows.stop, (expert + 1) * self._height)
            parts.append(self._experts[expert].delta(slice(row, row + stop - start)).to(self.weight.dtype))
            start = stop
        value, error = (np.concatenate([getattr(part, name) for part in parts]) for name in ("value", "error"))
        return Typed(value=value, error=error, dtype=self.weight.dtype)


def of(source: Source) -> AddedForm | None:
    """Return the form of a parameter of two or three dimensions whose factors are in the file."""
    a, b, weight = source.tensor("lora_A"), source.tensor("lora_B"), source.weight
    if a is None or b is None:
        return None
    if weight.dim() == 2:
        found = of_linear(source)
        return None if found is None else OneParameter(source, found)
    experts = weight.shape[0]
    if weight.dim() != 3 or experts == 1:
        return None
    inner = a.reshape(experts, -1, a.shape[-1])  # (experts, rank, in)
    outer = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)  # (experts, out, rank)
    # before version 0.19 PEFT takes each stack as (experts, in, out), and its layer has no such attribute
    swaps = hasattr(source.layer, "_did_swap_in_out_features")
    if getattr(source.layer.get_base_layer(), "is_transposed", False) or not swaps:  # (experts, in, out)
        outer, inner = inner.transpose(1, 2), outer.transpose(1, 2)
    fits = weight.shape == (experts, outer.shape[1], inner.shape[2])
    return Experts(source, outer, inner) if fits else None
