"""A block of a model as a function of all that its results depend on.

Hooks keep what entered the block in a pass, and the gradient that arrived at it. With these and its weights it is
computed by itself, forward and backward, on its device, in float64 and with noise. Dropout is switched off, since a
card draws other numbers than the CPU, and one sequence of the batch is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from consistency.extras.watching.micro_batch import MicroBatch, WatchedModel, first_tensor

_CACHES = ("past_key_values", "past_key_value", "cache_position", "layer_past", "cache")
"""Arguments that hold what earlier tokens left: there are none in a training, and a block would add to them."""


@dataclass(slots=True, kw_only=True)
class BlockInputs:
    """What entered a block in a pass, and the gradient that arrived at its output."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    incoming: torch.Tensor | None = None


def inputs_of_block(
    watched: WatchedModel, batch: MicroBatch, name: str, arriving: Mapping[int, torch.Tensor]
) -> BlockInputs:
    """Compute a micro-batch once more, and return what enters one block and arrives at it."""
    inputs = BlockInputs()
    handles = keep_inputs_of(watched.blocks[name], inputs)
    try:
        watched.repeat(batch, arriving)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def keep_inputs_of(block: torch.nn.Module, inputs: BlockInputs) -> list[Any]:
    """Keep what enters a block in its next pass, and arrives at it; return the handles of the hooks that do."""

    def keep_inputs(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if inputs.kwargs is None:  # a checkpointed block computes twice
            inputs.args, inputs.kwargs = (
                _plain(args),
                {key: _plain(kwargs[key]) for key in kwargs if key not in _CACHES},
            )

    def keep_incoming(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda gradient: setattr(inputs, "incoming", gradient.detach()))

    return [
        block.register_forward_pre_hook(keep_inputs, with_kwargs=True),
        block.register_forward_hook(keep_incoming),
    ]


def _plain(value: Any) -> Any:
    """Return an argument without its graph, and without a cache: some blocks get one by position."""

    def is_cache(leaf: Any) -> bool:
        return hasattr(leaf, "get_seq_length") and hasattr(leaf, "update")

    def plain(leaf: Any) -> Any:
        if is_cache(leaf):
            return None
        return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

    return _pytree.tree_map(plain, value, is_leaf=is_cache)


def whole_state(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a block, gathered from all ranks where they are sharded."""
    state = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in state.items()
    }


class _WithoutHooks(torch.nn.Module):
    """A block that computes without its own hooks, by which FSDP2 would gather its weights in place of those given."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.forward(*args, **kwargs)


def _computed(block: torch.nn.Module, state: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Return what a block computes with other tensors in the place of its parameters and buffers."""
    if not isinstance(block, FSDPModule):
        return torch.func.functional_call(block, dict(state), args, kwargs)
    named = {f"block.{name}": tensor for name, tensor in state.items()}
    return torch.func.functional_call(_WithoutHooks(block), named, args, kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFunction:
    """A block as a function of all that its results depend on.

    Attributes
    ----------
    block : torch.nn.Module
        The block.
    inputs : tuple
        Its parameters and buffers by name, whole; the first sequence of its arguments by position and by name, and of
        the gradient that arrives at its output.
    """

    block: torch.nn.Module
    inputs: tuple[Any, ...]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Return the block's parameters and buffers."""
        state: dict[str, torch.Tensor] = self.inputs[0]
        return state

    @property
    def device(self) -> torch.device:
        """Return the device of its input."""
        incoming: torch.Tensor = self.inputs[-1]
        return incoming.device

    @property
    def compute(self) -> Callable[..., dict[str, torch.Tensor]]:
        """Return a function of `inputs`: the block's output, the gradients of its input and its trained parameters."""
        trained = {name for name, parameter in self.block.named_parameters() if parameter.requires_grad}
        return _forward_and_backward(self.block, trained)


def function_of(block: torch.nn.Module, state: Mapping[str, torch.Tensor], inputs: BlockInputs) -> BlockFunction:
    """Return a block as a function, with the first sequence of what entered it.

    Parameters
    ----------
    state : mapping of str to torch.Tensor
        The block's parameters and buffers, whole.
    """
    assert inputs.kwargs is not None
    assert inputs.incoming is not None
    rows = inputs.incoming.shape[0]
    arguments = _first_row(inputs.args, rows), _first_row(inputs.kwargs, rows)
    return BlockFunction(block=block, inputs=(dict(state), *arguments, inputs.incoming[:1]))


def _first_row(value: Any, rows: int) -> Any:
    """Return the part of a block's inputs that is of the first sequence."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == rows:
            return leaf[:1]
        return leaf

    return _pytree.tree_map(cut, value)


def _forward_and_backward(block: torch.nn.Module, trained: set[str]) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a block as a function of its parameters, its inputs and the gradient that arrives at its output."""

    def forward_and_backward(
        state: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], incoming: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            state = {
                name: tensor.detach().requires_grad_(name in trained) if tensor.is_floating_point() else tensor
                for name, tensor in state.items()
            }
            first = _first_floating(args, kwargs).detach().requires_grad_()
            args, kwargs = _with_first(args, kwargs, first)
            output = first_tensor(_computed(block, state, args, kwargs))
            assert output is not None
            wanted = {"input": first, **{name: state[name] for name in sorted(trained)}}
            gradients = torch.autograd.grad(output, list(wanted.values()), incoming, allow_unused=True)
        results = {"output": output}
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                results[f"gradient of {name}"] = gradient
        return results

    forward_and_backward.__name__ = type(block).__name__
    return forward_and_backward


def _first_floating(args: Any, kwargs: Any) -> torch.Tensor:
    tensor = first_tensor((args, kwargs))
    if tensor is None:
        raise TypeError("no floating-point tensor enters the block")
    return tensor


def _with_first(args: Any, kwargs: Any, replacement: torch.Tensor) -> tuple[Any, Any]:
    """Return a block's inputs with another tensor in the place of the first floating-point one."""
    first = first_tensor((args, kwargs))
    result: tuple[Any, Any] = _pytree.tree_map(lambda leaf: replacement if leaf is first else leaf, (args, kwargs))
    return result


@contextmanager
def without_dropout(module: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off, and checkpointing, which a gradient by itself has no use for."""
    switched: list[tuple[torch.nn.Module, str, Any]] = []
    for part in module.modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            switched.append((part, "gradient_checkpointing", True))
            part.gradient_checkpointing = False  # type: ignore[assignment]
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            switched.append((part, "p", part.p))
            part.p = 0.0
        elif isinstance(getattr(part, "attention_dropout", None), float):  # attention reads it in training mode
            switched.append((part, "attention_dropout", part.attention_dropout))
            part.attention_dropout = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, name, value in switched:
            setattr(part, name, value)
