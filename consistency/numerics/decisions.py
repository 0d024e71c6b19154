"""Watch the operations that decide: where a rounding difference may become a jump.

A ReLU's gradient depends on the sign of its operand, a router on an order of scores, a mask on a comparison, a
quantizer on the nearest integer. Each decision rests on an operand and has a *margin*: how far the operand is from
where the decision changes. `decision_jumps` and `decision_kinks` list the operations; `DecisionMode` hands each of them
to a watcher, below autograd, in the forward and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from consistency.numerics.decision import Decision
from consistency.numerics.decision_jumps import DECIDING
from consistency.numerics.decision_kinks import OF_GRADIENTS

Watch = Callable[[Decision], torch.Tensor | None]
"""Called with each decision; returns what is to be decided instead, None to leave it."""


class Remembered:
    """The decisions of a part of a pass, which may be computed again for its backward pass."""

    def __init__(self) -> None:
        self._decided: list[torch.Tensor] = []
        self._left: Iterator[torch.Tensor] | None = None

    def begin(self) -> None:
        """Begin the part: for the first time, or again."""
        self._left = iter(self._decided) if self._decided else None

    def settle(self, decision: Decision, watch: Watch) -> torch.Tensor | None:
        """Return what is to be decided instead of what was: again, what was decided first."""
        if self._left is not None:
            before = next(self._left, None)
            same = before is None or before.shape != decision.decided.shape or torch.equal(before, decision.decided)
            return None if same else before
        wanted = watch(decision)
        self._decided.append(decision.decided if wanted is None else wanted)
        return wanted


class DecisionMode(TorchDispatchMode):
    """Hand every decision to a watcher while the mode is active.

    Parameters
    ----------
    watch : callable
    gradient : bool
        Watch also the decisions that a gradient alone depends on.
    """

    _active: ClassVar[DecisionMode | None] = None  # of the process: a backward pass may run in another thread

    def __init__(self, watch: Watch, *, gradient: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._watch = watch
        self._part: Remembered | None = None
        self._made_by = {**DECIDING, **OF_GRADIENTS} if gradient else DECIDING

    def __enter__(self) -> DecisionMode:
        DecisionMode._active = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        DecisionMode._active = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    @contextmanager
    def remembering(cls, part: Remembered) -> Iterator[None]:
        """Compute a part of the active pass, if there is one: what is computed again decides as before, unwatched."""
        active = cls._active
        if active is None:
            yield
            return
        part.begin()
        outer, active._part = active._part, part
        try:
            yield
        finally:
            active._part = outer

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
            wanted = self._watch(decision) if self._part is None else self._part.settle(decision, self._watch)
        return found if wanted is None else decision.force(wanted)
