"""Watch the operations that decide: where a rounding difference may become a jump.

A ReLU's gradient depends on the sign of its operand, a router on an order of scores, a mask on a comparison, a
quantizer on the nearest integer. Each decision rests on an operand and has a *margin*: how far the operand is from
where the decision changes. `decision_jumps` and `decision_kinks` list the operations; `DecisionMode` hands each of them
to a watcher, below autograd, in the forward and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from consistency.numerics.decision import Decision
from consistency.numerics.decision_jumps import DECIDING
from consistency.numerics.decision_kinks import OF_GRADIENTS

Watch = Callable[[Decision], torch.Tensor | None]
"""Called with each decision; returns what is to be decided instead, None to leave it."""


class DecisionMode(TorchDispatchMode):
    """Hand every decision to a watcher while the mode is active.

    Parameters
    ----------
    watch : callable
    gradient : bool
        Watch also the decisions that a gradient alone depends on.
    """

    def __init__(self, watch: Watch, *, gradient: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._watch = watch
        self._made_by = {**DECIDING, **OF_GRADIENTS} if gradient else DECIDING

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        decide, kwargs = self._made_by.get(func), kwargs or {}
        if decide is None:
            return func(*args, **kwargs)
        found, decision = decide(func, args, kwargs)
        if decision is None:
            return found
        with _disable_current_modes():  # what a watcher computes is not part of the pass, nor in its precision
            wanted = self._watch(decision)
        return found if wanted is None else decision.force(wanted)
