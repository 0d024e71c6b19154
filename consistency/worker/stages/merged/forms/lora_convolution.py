"""LoRA on a convolution: the product of the factors (`low_rank_product`), added as on a linear layer.

A safe merge rounds the delta to the weight's dtype first, and before PEFT 0.20 any merge.
"""

from __future__ import annotations

from consistency.numerics.typed import Typed
from consistency.worker.environment import release
from consistency.worker.stages.merged.forms.form import AddedForm
from consistency.worker.stages.merged.forms.low_rank_product import LowRankFactors, of_convolution
from consistency.worker.stages.merged.forms.source import Source


class LoraConvolution(AddedForm):
    """The delta of a LoRA on a convolution."""

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
        return self._factors.delta(rows)
