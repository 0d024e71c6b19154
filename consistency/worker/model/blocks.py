"""The repeated blocks of a model, and a backward pass that computes their activations again instead of keeping them.

Kept activations grow with the depth of a model. With recomputation only the states between blocks are kept, and the
activations of the one block whose backward pass is running (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016), by torch's own `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from consistency.numerics.digest import digest


class RecomputationError(Exception):
    """A block gives another result when it is computed again, so that its gradients would be those of another function.

    A method may set up its layers for one forward pass only, and a kernel may not repeat bitwise.
    """


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules that a model keeps in lists of two and more: its decoder layers, stages, blocks."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    outermost = [(name, m) for name, m in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return [block for _, blocks in outermost for block in blocks]


@contextmanager
def recomputed(model: torch.nn.Module) -> Iterator[None]:
    """Compute the blocks' activations again in a backward pass.

    Raises
    ------
    RecomputationError
        In the backward pass.
    """
    blocks = repeated_blocks(model)
    kept = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = _Recomputed(block, block.forward)
        with set_checkpoint_early_stop(False):  # a block is compared as a whole
            yield
    finally:
        for block, forward in zip(blocks, kept, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


class _Recomputed:
    """The forward pass of a block whose activations are not kept."""

    def __init__(self, block: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self._block = block
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        first: list[str] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            found = self._forward(*args, **kwargs)
            here = _digest_of(found)
            if first and first[0] != here:
                raise RecomputationError(f"{type(self._block).__name__} gives another result when it is computed again")
            first.append(here)
            return found

        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _digest_of(found: Any) -> str:
    tensors = [value for value in _pytree.tree_leaves(found) if isinstance(value, torch.Tensor)]
    return digest(tensors[0]).value if tensors else ""
