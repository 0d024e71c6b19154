"""A discrete decision of an operation, such as a ReLU's sign or a top-k: operand, outcome, margin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

CONTINUOUS = ("max", "min")
"""Decisions of which the value is used, and another one gives nearly the same: the largest score before a softmax."""

Force = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One call of an operation that decides."""

    name: str
    """Of the operation."""
    operand: torch.Tensor
    """The values on which it rests; of a comparison, the difference of both sides."""
    decided: torch.Tensor
    """What was decided, element by element: a truth value, the number of an interval, an integer; of a selection, the
    indices that were chosen."""
    margins: Callable[[torch.Tensor], torch.Tensor]
    """Return the margin of each element, from the exact operand."""
    force: Force
    """Return the result of the operation if something else had been decided."""
    dim: int | None = None
    """Of a selection in order, the dimension of the operand that its indices are of."""
    scores: int = 1
    """How many values of the operand a margin lies between, each of which may be off: two of a selection."""


def gaps(scores: torch.Tensor, dim: int, here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the margin of a selection: how far apart in the exact scores the two elements are that were chosen."""
    return (scores.gather(dim, here) - scores.gather(dim, there)).abs()


Decide = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], tuple[Any, Decision | None]]
"""Call an operation; return its result, and the decision in it where there is one."""


def is_real(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def name_of(func: Any) -> str:
    """Return the name of an operation, without that of its form."""
    return str(func._schema.name.partition("::")[2])


def in_place(decide: Decide, plain: Any) -> Decide:
    """Return what watches the form of an operation that writes its result into the first operand."""

    def decide_in_place(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        x, *others = args
        found, decision = decide(plain, (x.clone(), *others), kwargs)
        result = x.copy_(found)
        if decision is None:
            return result, None
        return result, dataclasses.replace(decision, force=lambda wanted: x.copy_(decision.force(wanted)))

    return decide_in_place
