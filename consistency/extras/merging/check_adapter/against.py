"""Compare the factors of two checkpoints of one adapter: the same, trained on from one another, or unrelated.

Training moves a factor a little from where it was, so that two checkpoints of one training point in nearly the same
direction. Two trainings begin from other random numbers: their factors are orthogonal up to chance, which for n
elements is a cosine of 1/sqrt(n).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from consistency.capture.wording import counted
from consistency.extras.merging.diff.mapped import StoredTensor

RELATED = 0.5
"""Cosine from which two factors are taken for checkpoints of one training.

Two that are unrelated have one of 1/sqrt(n): 0.02 for the smallest factors of 2,048 elements. One that was trained on
keeps its first values in the sum, and half of its direction until it has moved by 1.7 times its length.
"""

_LEAST_ELEMENTS = 256  # of fewer, chance makes a cosine of 0.06 and more

_MOST_ELEMENTS = 1 << 16
"""Elements of a factor, evenly taken, that the cosine is computed of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """How an adapter's factors stand to those of another file.

    Attributes
    ----------
    equal, trained_on, unrelated : int
        How many tensors of both files have the same bytes, nearly the same direction, and another one.
    only_here, only_there : int
        How many tensors one of the two files has alone.
    undecided : int
        How many are zero in one of them, or too small to tell.
    """

    equal: int
    trained_on: int
    unrelated: int
    undecided: int
    only_here: int
    only_there: int

    @property
    def is_same_training(self) -> bool:
        """Report whether any factor is that of the other file, or was trained on from it."""
        return bool(self.equal + self.trained_on) and not self.unrelated

    @property
    def sentence(self) -> str:
        """Return it in one sentence."""
        common = self.equal + self.trained_on + self.unrelated + self.undecided
        if not common:
            return "no tensor of the one has the name and shape of one of the other"
        parts = [
            f"{count} {what}"
            for count, what in (
                (self.equal, "equal"),
                (self.trained_on, "trained on from it"),
                (self.unrelated, "have nothing in common with it"),
                (self.undecided, "too small, or zero in one of the two: nothing can be said"),
                (self.only_here, "only here"),
                (self.only_there, "only there"),
            )
            if count
        ]
        return f"of {counted(common, 'tensor')} of both: {', '.join(parts)}"


def relation(here: Mapping[str, StoredTensor], there: Mapping[str, StoredTensor]) -> Relation:
    """Compare the tensors of two adapter files by their names."""
    counts: Counter[str] = Counter()
    common = [name for name in here if name in there and here[name].shape == there[name].shape]
    for name in common:
        counts[_kind_of(here[name], there[name])] += 1
    return Relation(
        equal=counts["equal"],
        trained_on=counts["trained_on"],
        unrelated=counts["unrelated"],
        undecided=counts["undecided"],
        only_here=len(here) - len(common),
        only_there=len(there) - len(common),
    )


def _kind_of(here: StoredTensor, there: StoredTensor) -> str:
    if here.dtype == there.dtype and np.array_equal(here.raw, there.raw):
        return "equal"
    a, b = _sampled(here), _sampled(there)
    if a is None or b is None or a.size < _LEAST_ELEMENTS:
        return "undecided"
    size = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    if not size or not np.isfinite(size):
        return "undecided"
    return "trained_on" if abs(float(a @ b)) / size >= RELATED else "unrelated"


def _sampled(tensor: StoredTensor) -> np.ndarray | None:
    """Return elements of a tensor, evenly taken, in float64; None where the dtype is no float that NumPy knows."""
    if tensor.dtype == "bfloat16":
        values = tensor.raw.view(np.uint16)
    elif tensor.dtype in ("float64", "float32", "float16"):
        values = tensor.raw.view(tensor.dtype)
    else:
        return None
    some = values[:: max(1, len(values) // _MOST_ELEMENTS)]
    if tensor.dtype == "bfloat16":
        some = (some.astype(np.uint32) << 16).view(np.float32)
    return some.astype(np.float64)
