"""The precisions in which units multiply float32, and what each adds to an error. No torch here."""

from __future__ import annotations

import enum
import math

TF32_ROUNDOFF = 2.0**-10
"""Largest relative error of an operand that is cut to TF32's 10 stored mantissa bits: truncated, not rounded."""

BFLOAT16_ROUNDOFF = 2.0**-8
"""Largest relative error of an operand that is rounded to bfloat16 to nearest, as `VCVTNEPS2BF16` does on x86."""

SPLIT_TERMS = 32
"""Fewest terms of an inner product that one partial sum covers: the smallest depth of a tile of half types in CUTLASS,
two instructions of 16."""

MOST_SPLITS = 32
"""Most partial sums of an inner product: the largest factor that a search over cuBLASLt's algorithms tries (NVIDIA's
sample LtHgemmCustomFind)."""


class Precision(enum.StrEnum):
    """The format to which a unit rounds the operands of float32 products before it multiplies; least precise last."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    BFLOAT16 = "bfloat16"

    @property
    def operand_error(self) -> float:
        """Return the largest relative error of an operand."""
        return {Precision.FLOAT32: 0.0, Precision.TF32: TF32_ROUNDOFF, Precision.BFLOAT16: BFLOAT16_ROUNDOFF}[self]

    @property
    def product_error(self) -> float:
        """Return the largest relative error of a product of two such operands, `2 t + t**2`."""
        return 2 * self.operand_error + self.operand_error**2

    @property
    def smallest(self) -> float:
        """Return the magnitude below which a unit may flush an operand, a product or a sum to zero."""
        # AMX and VCVTNEPS2BF16 take subnormals as zero
        return 2.0**-126 if self is Precision.BFLOAT16 else 0.0


def partial_sums_error(terms: int, unit: float, *, each: int = SPLIT_TERMS) -> float:
    r"""Bound the relative error of partial sums of `each` terms that are stored in a half type and added up in it.

    An inner product of n terms has at most :math:`m = \lceil n / each \rceil` partial sums, and each term passes
    through at most m roundings: :math:`(1 + u)^m - 1`. Accumulated in the half type altogether, `each` is 1.
    """
    return math.expm1(math.ceil(terms / each) * math.log1p(unit))


def partial_sums(terms: int, each: int) -> int:
    """Return how many partial sums of an inner product a device may store in a half type, one after another.

    Parameters
    ----------
    terms, each : int
        Terms of the inner product, and of a partial sum; where each term is stored, there are as many as terms.
    """
    return terms if each <= 1 else min(MOST_SPLITS, math.ceil(terms / each))
