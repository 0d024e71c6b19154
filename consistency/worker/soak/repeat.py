"""The second entry of a stage, `again` of its `StageSpec`: it repeats on the device what the stage computed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from consistency.numerics.digest import TensorDigest
from consistency.worker.soak.ledger import Expected, Ledger

Again = Callable[[], Iterator[None]]
"""Repeats a stage once; it may be ended at each `yield`."""


class Compare:
    """Compare what one stage computes again; see `Ledger`."""

    def __init__(self, ledger: Ledger, stage: str) -> None:
        self._ledger = ledger
        self._stage = stage

    def knows(self, layer: str, tensor: str) -> bool:
        """Report whether the first run recorded a tensor."""
        return self._ledger.knows((self._stage, layer, tensor))

    def has(self, tensor: str) -> bool:
        """Report whether the first run recorded a tensor of this name in any layer."""
        return self._ledger.has(self._stage, tensor)

    def learn(self, layer: str, tensor: str, right: str) -> None:
        """Set the digest of a tensor that the first run has not recorded."""
        self._ledger.learn((self._stage, layer, tensor), right)

    def __call__(
        self,
        layer: str,
        tensor: str,
        value: torch.Tensor | TensorDigest,
        *,
        own: bool = False,
        held: torch.Tensor | None = None,
        expected: Expected | None = None,
    ) -> None:
        self._ledger.see((self._stage, layer, tensor), value, own=own, held=held, expected=expected)
