"""The repeated blocks of a model, and a backward pass that computes their activations again instead of keeping them.

Kept activations grow with the depth of a model. With recomputation only the states between blocks are kept, and the
activations of the one block whose backward pass is running (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016), by torch's own `checkpoint`. It costs a forward pass, a third of the time where weights are frozen, so
blocks keep theirs as long as there is room.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from consistency.errors import first_line
from consistency.numerics.decisions import DecisionMode, Remembered
from consistency.numerics.digest import digest
from consistency.numerics.rounding_noise import RoundingNoise
from consistency.worker.model.running import is_of_the_model

ROOM_BYTES = 1 << 30
"""Of activations at most; less where a quarter of the largest block, in float64, is smaller. Half of the 2 GB of
private memory that a worker may take beside what grows with a layer."""

ROOM_SHARE = 4
"""Of the largest block in float64 (one part in so many): the memory of a backward pass grows with a model's blocks by
the activations that are kept and by those of one block that is computed again, and both together stay below a block."""

LEAST_ROOM_BYTES = 1 << 24
"""Of activations that are kept however small the blocks are. Computing those of a tiny model again takes a quarter of
the processor time of its case; this is a small part of what the libraries take."""


class RecomputationError(Exception):
    """A block gives another result when it is computed again, or none: its gradients would be another function's.

    A method may set up its layers for one forward pass only, and a kernel may not repeat bitwise.
    """


def room_for(model: torch.nn.Module) -> int:
    """Return how many bytes of activations a backward pass on the CPU may keep."""
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks_of(model).values()]
    return min(ROOM_BYTES, max(LEAST_ROOM_BYTES, torch.float64.itemsize * max(sizes, default=0) // ROOM_SHARE))


def blocks_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of the outermost lists of modules, by name: decoder layers, stages, blocks."""
    found: dict[str, torch.nn.Module] = {}
    left = [("", model)]
    while left:
        prefix, module = left.pop(0)
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(child, torch.nn.ModuleList):
                found.update((f"{path}.{i}", block) for i, block in child.named_children() if not _holds_alone(block))
            else:
                left.append((path, child))
    return found


def _holds_alone(block: torch.nn.Module) -> bool:
    return isinstance(block, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList)


class Room:
    """Memory for activations, in bytes, that blocks fill one after the other.

    Attributes
    ----------
    is_ample : bool
        Whether the pass before left half of it, so that nothing has to be counted: that takes a tenth of the time of a
        small model.
    """

    def __init__(self, size: int, model: torch.nn.Module) -> None:
        held = itertools.chain(model.parameters(), model.buffers())
        self._held = {tensor.untyped_storage()._cdata for tensor in held if tensor.layout is torch.strided}
        self._seen = set(self._held)
        self._size = self._left = size
        self._has_begun = self.is_ample = False

    def begin(self) -> None:
        """Begin a pass, over no more than the one before: nothing is kept yet."""
        self.is_ample = self._has_begun and self._left > self._size // 2
        self._has_begun = True
        self._left, self._seen = self._size, set(self._held)

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what a tensor that is kept takes, once for all views of it; a subclass wraps what is counted.

        A sparse one has no storage: a method's table, which its parts are in memory for already.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._left -= storage.nbytes()
        return tensor


@contextmanager
def recomputed(
    model: torch.nn.Module, *, room: int = 0, again: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[Room]:
    """Compute the blocks' activations again in a backward pass, each inside what `again` returns.

    Yield the room for what is kept, which begins anew with each pass.

    Parameters
    ----------
    room : int
        Bytes of activations that the first blocks keep instead, and as much more as the last of them takes.

    Raises
    ------
    RecomputationError
        In the backward pass.
    """
    blocks = [*blocks_of(model).values()]
    kept = [vars(block).get("forward") for block in blocks]
    shared = Room(room, model)
    try:
        for block in blocks:
            block.forward = _Recomputed(block, block.forward, shared, again)
        with set_checkpoint_early_stop(False):  # a block is compared as a whole
            yield shared
    finally:
        for block, forward in zip(blocks, kept, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


class _Recomputed:
    """The forward pass of a block whose activations are kept only if there is room."""

    def __init__(
        self,
        block: torch.nn.Module,
        forward: Callable[..., Any],
        room: Room,
        again: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._block = block
        self._forward = forward
        self._room = room
        self._again = again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._room.is_ample or not torch.is_grad_enabled() or _grows(*args, *kwargs.values()):
            return self._forward(*args, **kwargs)
        if not self._room.is_full:
            with saved_tensors_hooks(self._room.take, lambda tensor: tensor):
                return self._forward(*args, **kwargs)
        first: list[str] = []
        decided = Remembered()  # which blocks are computed again differs between devices, what they decide must not
        noise: list[int] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                with DecisionMode.remembering(decided), RoundingNoise.repeating(noise):
                    found = self._forward(*args, **kwargs)
            except Exception as error:  # model code of any kind may raise anything
                if not first or not is_of_the_model(error, self._block):
                    raise
                reason = f"{type(self._block).__name__} does not run again: {first_line(error)}"
                raise RecomputationError(reason) from error
            here = _digest_of(found)
            if first and first[0] != here:
                raise RecomputationError(f"{type(self._block).__name__} gives another result when it is computed again")
            first.append(here)
            return found

        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._again()), **kwargs,
        )  # fmt: skip


def _grows(*given: Any) -> bool:
    """Report a cache among a block's arguments, as of a prefix: each pass adds to it, a second one would see both."""
    from transformers import Cache

    return any(isinstance(value, Cache) for value in given)


def _digest_of(found: Any) -> str:
    tensors = [value for value in _pytree.tree_leaves(found) if isinstance(value, torch.Tensor)]
    return digest(tensors[0]).value if tensors else ""
