"""The decisions of one float64 pass, which passes with noise take over."""

from __future__ import annotations

import torch

from consistency.numerics.decision import Decision
from consistency.numerics.decisions import Watch
from consistency.worker.decisions.track import digest_of, plain


class ExactDecisions:
    """Remembers the decisions of a pass in their order, and has other passes decide alike.

    Noise may turn a decision that no device turns: where an integer is cut from a logarithm, its value for a power of
    two is on the boundary.

    Attributes
    ----------
    digests : list of str
        Of what was decided.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._kept: list[tuple[str, torch.Tensor]] = []

    def remember(self) -> Watch:
        """Return what remembers a pass from its start."""
        self.digests.clear()
        self._kept.clear()

        def record(decision: Decision) -> None:
            self.digests.append(digest_of(decision.decided))
            self._kept.append((decision.name, plain(decision.decided).clone()))

        return record

    def follow(self) -> Watch | None:
        """Return what has a pass decide as the remembered one did, operation by operation."""
        left = iter(self._kept)

        def decide(decision: Decision) -> torch.Tensor | None:
            name, decided = next(left, ("", None))
            is_alike = decided is not None and (name, decided.shape) == (decision.name, decision.decided.shape)
            return decided if is_alike else None

        return decide if self._kept else None
