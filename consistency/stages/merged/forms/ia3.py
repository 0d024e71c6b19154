r"""IA³: one multiplication, :math:`W'_{oi} = W_{oi} l_i` of a feed-forward layer, :math:`W_{oi} l_o` of any other.

A vector scales the inputs or the outputs. The product is computed in the wider dtype of weight and vector and rounded
to that of the weight: half a unit in the last place of each rounding is all that is allowed. In one dtype that is the
correctly rounded product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from consistency.numerics.typed import Typed
from consistency.stages.merged.forms.form import Form, Judged
from consistency.stages.merged.forms.source import Source


class IA3(Form):
    """The merged weight of an IA³ layer; it adds nothing."""

    has_delta = False

    def __init__(self, source: Source, vector: torch.Tensor) -> None:
        super().__init__(source.weight)
        self._vector = vector.detach().reshape(-1)
        layer, weight = source.layer, source.weight
        transposed = bool(getattr(layer, "fan_in_fan_out", False)) and weight.dim() == 2
        self._inputs = bool(layer.is_feedforward)
        # outputs are rows and inputs columns, unless the weight is stored the other way round
        self._by_row = self._inputs == transposed
        # elements of a kernel, which one input or output scales together
        self._inner = weight[0, 0].numel() if weight.dim() > 2 else 1
        self._outputs_per_group = weight.shape[0] // int(getattr(layer.get_base_layer(), "groups", 1))

    @classmethod
    def of(cls, source: Source) -> IA3 | None:
        """Return the form of a layer whose vector is in the file."""
        vector = source.tensor("ia3_l")
        return None if vector is None else cls(source, vector)

    def block(self, tensors: Sequence[Judged], rows: slice) -> Sequence[Typed]:
        """Return rows of the exact merged weight, once for each tensor: a safe merge is the same product."""
        base = self.base(rows)
        scaled = (base * Typed.known(self._scales(rows))).to(base.dtype)
        return [scaled] * len(tensors)

    def _scales(self, rows: slice) -> torch.Tensor:
        """Return the elements of the vector that scale some rows, `(n, width)` or `(n, 1)`."""
        numbers = torch.arange(self.rows)[rows]
        if self._by_row:
            return self._vector[numbers][:, None]
        columns = self.width // self._inner
        groups = torch.zeros_like(numbers)
        if self._inputs:  # the rows of a group of a convolution have inputs of their own
            groups = numbers // self._outputs_per_group
        inputs = groups[:, None] * columns + torch.arange(columns)
        return self._vector[inputs].repeat_interleave(self._inner, dim=1)
