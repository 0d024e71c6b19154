r"""Exact results of `dare_linear` and `dare_ties`, given the elements of the factors that chance left in.

Both keep each element with the probability `density`, drawn by the device's own generator, and divide what is kept by
it. Which elements they are differs from device to device, so every draw is noted while PEFT takes it, and the values
are judged given these. That a draw keeps the right share is judged apart: of n independent draws with probability p,
the share that is kept is further than t from p with a probability of at most :math:`2 \exp(-2 n t^2)` (Hoeffding, 1963,
theorem 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from consistency.extras.peft_api.adapters.pruned import DENSITY, added, elected, where
from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.running_error import Arithmetic, Tracked
from consistency.worker.determinism import seeded

BY_CHANCE = ("dare_linear", "dare_ties")

FALSE_ALARM = 1e-15
"""How often a healthy generator may be reported: far below `numerics.rules.FALSE_ALARM`, as it costs little here."""

_DRAWS = frozenset({torch.ops.aten.bernoulli.default, torch.ops.aten.bernoulli_.Tensor, torch.ops.aten.bernoulli.p})


class Draws(DispatchMode):
    """Note which elements each draw keeps, in order, on the CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func in _DRAWS:
            self.kept.append((result != 0).to("cpu"))
        return result


@contextmanager
def drawing() -> Iterator[Draws]:
    """Note draws that are the same in every run on one device, and leave all generators as they were."""
    with seeded(), Draws() as draws:
        yield draws


def rescaled(term: Tracked, kept: np.ndarray, density: float = DENSITY) -> Tracked:
    """Return the elements of a tensor that a draw keeps, divided by the probability of each. Zeros are exact."""
    nonzero = kept & ((term.value != 0) | (term.error != 0))
    return where(nonzero, (where(kept, term) / term.by.constant(density)).store())


def chosen(
    kind: str, by: Arithmetic, tensors: Sequence[np.ndarray], masks: Sequence[np.ndarray], weights: Sequence[float]
) -> Tracked:
    """Return the exact combination of factors of one shape, given what each draw kept.

    Parameters
    ----------
    kind : str
        One of `BY_CHANCE`.
    tensors : sequence of np.ndarray
        Float64, as stored in the dtype of the factors.
    weights : sequence of float
        The root of each adapter's weight times its scaling, with its sign where the factor carries it.
    """
    kept = [rescaled(by.known(tensor), mask) for tensor, mask in zip(tensors, masks, strict=True)]
    return (elected(kept, weights) if kind == "dare_ties" else added(kept, weights)).store()


def share_of_chance(kept: int, draws: int, probability: float) -> float:
    """Return the distance of the kept fraction from its probability, over what chance allows; 0 without draws."""
    if not draws:
        return 0.0
    allowed = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * draws))
    return abs(kept / draws - probability) / allowed
