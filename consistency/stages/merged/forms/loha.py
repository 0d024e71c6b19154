r"""LoHa: the elementwise product of two low-rank products, :math:`\Delta = s\,(A_1 B_1) \odot (A_2 B_2)`.

PEFT computes both products, multiplies them, and multiplies by the scaling, each in the dtype of the adapter. With rank
K, :math:`P_i = |A_i||B_i|` and unit roundoff u the errors of the products are at most :math:`\gamma_K P_i`, and so
:math:`|\hat\Delta - \Delta| \lesssim |s| (\gamma_K (P_1 |A_2 B_2| + P_2 |A_1 B_1|) + 2 u |P_1 P_2|)`, which the running
bound follows with its terms of second order; half types are rounded after each of the four steps. PEFT holds the
scaling in float32, whatever the dtype of the adapter.

With `use_effective_conv2d` a product is :math:`\sum_{ij} t_{ijk} a_{ip} b_{jr}` (`typed.tucker`).
"""

from __future__ import annotations

import torch

from consistency.numerics.typed import Typed, tucker
from consistency.stages.merged.forms.form import AddedForm
from consistency.stages.merged.forms.source import Source

Factors = tuple[Typed | None, Typed, Typed]
"""Core, left and right factor: `(r, r, k)`, `(r, out)` and `(r, in)`; without a core None, `(out, r)` and `(r, in)`."""


class LoHa(AddedForm):
    """The delta of a LoHa layer."""

    def __init__(self, source: Source, factors: tuple[Factors, Factors]) -> None:
        super().__init__(source.weight)
        self._source = source
        self._factors = factors
        self._scaling = source.lycoris_scaling()

    @classmethod
    def of(cls, source: Source) -> LoHa | None:
        """Return the form of a layer whose factors are all in the file."""
        first, second = (cls._factors_of(source, number) for number in (1, 2))
        return None if first is None or second is None else cls(source, (first, second))

    @staticmethod
    def _factors_of(source: Source, number: int) -> Factors | None:
        """Return the factors of the first or second product; None where the file lacks one."""
        left, right = source.known(f"hada_w{number}_a"), source.known(f"hada_w{number}_b")
        if left is None or right is None:
            return None
        core = source.known(f"hada_t{number}")
        if core is not None:  # the dimensions of the kernel become one
            core = core.moved(lambda t: t.reshape(*t.shape[:2], -1))
        return core, left, right

    def delta(self, rows: slice) -> Typed:
        """Return rows of the product of both low-rank products."""
        first, second = (self._product(factors, rows) for factors in self._factors)
        return (first * second).scaled(self._scaling, held_in=torch.float32)

    def _product(self, factors: Factors, rows: slice) -> Typed:
        """Return rows of one low-rank product, `(n, width)`."""
        core, left, right = factors
        if core is None:
            return left.moved(lambda a: a[rows]).matmul(right, self._source.matmul)
        product = tucker(core, left.moved(lambda a: a[:, rows]), right, self._source.matmul)
        return product.moved(lambda v: v.reshape(len(v), -1))
