"""A discrete decision of an operation, such as a ReLU's sign or a top-k: operand, outcome, margin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

CONTINUOUS = ("max", "min")
"""Decisions whose value is used, and another choice has nearly the same value: the largest score before a softmax."""

Force = Callable[[torch.Tensor], Any]
"""Return the result that an operation has with another outcome, given in the form of `Decision.decided`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One call of an operation that decides."""

    name: str
    """Name of the operation."""
    operand: torch.Tensor
    """The values on which it rests; of a comparison, the difference of both sides."""
    decided: torch.Tensor
    """The outcome of each element: a truth value, the number of an interval, an integer; for a selection, the indices
    that were chosen."""
    margins: Callable[[torch.Tensor], torch.Tensor]
    """Returns the margin of each element, from the exact operand."""
    force: Force
    """Returns the result that the operation would have if something else had been decided."""
    dim: int | None = None
    """Dimension of the operand along which a selection in order chooses; None for any other decision."""
    scores: int = 1
    """Number of values of the operand that a margin lies between, each of which may be off: two for a selection."""


def gaps(scores: torch.Tensor, dim: int, here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the margins of a selection: the distance in the exact scores between the elements that two sides chose.

    Parameters
    ----------
    scores : torch.Tensor
        The exact operand.
    dim : int
        The dimension along which both sides choose.
    here, there : torch.Tensor
        The indices that each side chose.
    """
    return (scores.gather(dim, here) - scores.gather(dim, there)).abs()


Decide = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], tuple[Any, Decision | None]]
"""Call an operation; return its result, and the decision in it where there is one."""


def is_real(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def name_of(func: Any) -> str:
    """Return the name of an operation without its namespace: `relu` for `aten::relu`."""
    return str(func._schema.name.partition("::")[2])


def in_place(decide: Decide, plain: Any) -> Decide:
    """Return the watcher of the form of an operation that writes its result into the first operand.

    Parameters
    ----------
    decide : callable
        The watcher of the plain form.
    plain : torch._ops.OpOverload
        The plain form, which is called with a copy of the operand: the decision keeps the operand as it was.
    """

    def decide_in_place(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Decision | None]:
        x, *further_args = args
        plain_result, decision = decide(plain, (x.clone(), *further_args), kwargs)
        result = x.copy_(plain_result)
        if decision is None:
            return result, None
        return result, dataclasses.replace(decision, force=lambda wanted: x.copy_(decision.force(wanted)))

    return decide_in_place
