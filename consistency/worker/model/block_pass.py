"""A pass of a model in which every block computes on given values: the same for every device.

From end to end errors accumulate, and a trained model amplifies them until nothing is sharp. So a pass in float64
rounds what enters and what leaves each block to the tested dtype, and keeps it; every other pass goes on with these
values at the same places. Then each block is a function by itself, the first wrong one is the only wrong one, and what
lies outside of the blocks (embeddings, masks, rotary tables, the final norm, the head) is one more: its results are
what enters the blocks, and the model's outputs.

Of a model with two blocks, with what is handed over by `take` (its name after a colon) and what `given` replaces::

         embeddings, masks, rotary tables
                       |
                       |  take: `layers.0::input.hidden_states`     then given() replaces the value
                       v
         +---------------------------+
         | block `layers.0`          |  take: `layers.0.self_attn::` and so on, of each module inside
         +---------------------------+
                       |  take: `layers.0::`                         then given() replaces the value
                       v
         +---------------------------+
         | block `layers.1`          |  what enters is known already: neither taken nor replaced again
         +---------------------------+
                       |  take: `layers.1::`                         then given() replaces the value
                       v
                final norm, head
                       |  take: `logits::`
                       v

* In the float64 pass `given` rounds each value to the tested dtype, keeps that under the name, and goes on with it;
  `take` keeps the value before rounding, which is the exact result.
* In a device's pass `given` returns the kept value of that name, on the device, whatever the device has computed;
  `take` compares what it has computed with the exact result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from consistency.numerics.decision import is_real
from consistency.worker.model.running import Activations, outputs, without_gradients
from consistency.worker.model.structure import blocks_of, parts_of


class ResultPlace(NamedTuple):
    """The place in a model at which a pass has a result."""

    layer: str
    """Name of the module in the base, or of an output of the model."""
    part: str = ""
    """Empty for the module's first output; `output.1` for its second, `input.attention_mask` for a block's input; with
    the number of the call where that is not the first, as in `output.1@2`."""

    def __str__(self) -> str:
        return f"{self.layer}::{self.part}"

    @classmethod
    def of(cls, name: str) -> ResultPlace:
        """Return the place that is written as `layer::part`."""
        return cls(*name.split("::"))


Given = Callable[[str, torch.Tensor], torch.Tensor]
"""Called with the name of a value that enters or leaves a block, and the value; returns the value to go on with."""

_OUTPUT_CAPTURING = "transformers.utils.output_capturing"
"""Module of the hooks with which transformers collects hidden states."""

Take = Callable[[ResultPlace, torch.Tensor], None]
"""Called with each result of a pass, on its device, before it is replaced."""

BlockBegan = Callable[[int, int, float], None]
"""Called when a block begins: with its number from 1, the number of blocks, and the fraction of the pass that is done.

A pass that goes back counts down. A block that is called several times, as ALBERT's only one, has a number for each
call.
"""


def no_listener(number: int, count: int, share: float) -> None:
    """Tell nobody which block a pass is in."""


def run_by_blocks(
    model: torch.nn.Module, inputs: Activations, given: Given, take: Take, *, began: BlockBegan = no_listener
) -> None:
    """Run a model on inputs, each block on given values, and hand over every result, on its device."""
    blocks = BlockPass(given, take, began=began)
    with torch.no_grad(), without_gradients(model), blocks.following(model):
        for name, output in outputs(model, inputs).items():
            take(ResultPlace(name), output)


@contextmanager
def computing_on(model: torch.nn.Module, given: Given, take: Take) -> Iterator[None]:
    """Let the blocks of a model compute on given values within a `with` block."""
    with BlockPass(given, take).following(model):
        yield


class BlockPass:
    """A pass in which hooks replace what enters and leaves each block, and hand over every result."""

    share_of_forward = 1.0
    """Fraction of the pass that runs forward."""

    def __init__(self, given: Given, take: Take, *, began: BlockBegan = no_listener) -> None:
        self._given = given
        self._take = take
        self._began = began
        self._blocks = 0
        self._blocks_begun = 0
        self._calls: dict[str, int] = {}
        """Number of calls so far, by name of the block."""
        self._given_by_identity: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """A tensor that was replaced or given, and the tensor that is given for it, by the identity of the first."""

    def begin_again(self) -> None:
        """Begin another call of the model, in which every value is taken and replaced anew."""
        self._calls.clear()
        self._given_by_identity.clear()

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Keep hooks on the blocks of a model for a `with` block."""
        blocks = blocks_of(model)
        self._blocks = len(blocks)
        with ExitStack() as hooks:
            for name, block in blocks.items():
                self._follow(name, block, hooks)
            yield

    def _follow(self, name: str, block: torch.nn.Module, hooks: ExitStack) -> None:
        """Put hooks on one block; `hooks` removes them."""
        try:
            parameters = [*inspect.signature(block.forward).parameters]
        except (TypeError, ValueError):
            parameters = []

        def begin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            # positional arguments get the names of their parameters, so that a place has one name however it is passed
            numbers = [str(i) for i in range(len(parameters), len(args))]
            keys = (parameters + numbers)[: len(args)]
            return self._begin(name, block, list(zip(keys, args, strict=True)), kwargs)

        def end(_: Any, __: Any, output: Any) -> Any:
            return self._end(name, output)

        hooks.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
        self._follow_children(name, block, hooks)
        hooks.callback(block.register_forward_hook(end).remove)
        # in its first pass transformers puts hooks in place that collect hidden states: moved behind ours, they collect
        # given values in that pass as in all others
        for number, hook in list(block._forward_hooks.items()):
            if getattr(hook, "__module__", "") == _OUTPUT_CAPTURING:
                block._forward_hooks[number] = block._forward_hooks.pop(number)

    def _follow_children(self, name: str, block: torch.nn.Module, hooks: ExitStack) -> None:
        """Hand over the results of the modules inside a block."""
        for child_name, child in parts_of(block).items():
            hook = child.register_forward_hook(self._taking_inside(name, f"{name}.{child_name}"))
            hooks.callback(hook.remove)

    def _begin(
        self,
        name: str,
        block: torch.nn.Module,  # noqa: ARG002 - for a pass that goes back
        args: list[tuple[str, Any]],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, positional and by keyword, that a block gets in place of its own."""
        done = self._blocks_begun
        self._blocks_begun += 1
        # a block that is called several times makes more calls than there are blocks
        count = max(self._blocks, self._blocks_begun)
        self._began(self._blocks_begun, count, self.share_of_forward * done / count)
        self._calls[name] = self._calls.get(name, 0) + 1
        new = [self._replace_argument(name, key, value) for key, value in args]
        return tuple(new), {key: self._replace_argument(name, key, value) for key, value in kwargs.items()}

    def _end(self, name: str, output: Any) -> Any:
        """Return the output of a block with given values in place of its tensors."""
        leaves, structure = _pytree.tree_flatten(output)
        number = 0
        for i, leaf in enumerate(leaves):
            if is_real(leaf):
                part = f"output.{number}" if number else ""
                leaves[i] = self._passed_on(name, part, leaf)
                number += 1
        return _pytree.tree_unflatten(leaves, structure)

    def _replace_argument(self, block: str, key: str, value: Any) -> Any:
        """Return an argument of a block with given values in place of its tensors, which may be nested."""
        leaves, structure = _pytree.tree_flatten(value)
        has_several_tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves) > 1
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                part = f"input.{key}.{i}" if has_several_tensors else f"input.{key}"
                leaves[i] = self._passed_on(block, part, leaf)
        return _pytree.tree_unflatten(leaves, structure)

    def _taking_inside(self, block: str, layer: str) -> Callable[..., None]:
        """Return a forward hook that hands over the first tensor of a module inside a block."""

        def take_first(_: Any, __: Any, output: Any) -> None:
            first = next((leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
            if first is not None and first.is_floating_point():
                self._take(self._place(block, layer, ""), first)

        return take_first

    def _passed_on(self, block: str, part: str, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the pass goes on with in place of one that enters or leaves a block.

        A tensor that several blocks get, and one that another block has left, is replaced by the same tensor each time.
        """
        if id(value) in self._given_by_identity:
            return self._given_by_identity[id(value)][1]
        place = self._place(block, block, part)
        self._take(place, value)
        # a copy: a block may write into what it gets
        result = self._given(str(place), value).clone() if value.is_floating_point() else value
        for tensor in (value, result):  # held, so that no other tensor gets its identity
            self._given_by_identity[id(tensor)] = tensor, result
        return result

    def _place(self, block: str, layer: str, part: str) -> ResultPlace:
        """Return the place of a result in the current call of a block."""
        call = self._calls.get(block, 1)
        return ResultPlace(layer, part if call == 1 else f"{part}@{call}")


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a value rounded to a dtype; a finite value stays finite, such as the smallest number in a mask."""
    with _disable_current_modes():
        limits, value = torch.finfo(dtype), value.detach()
        return torch.where(value.isinf(), value, value.clamp(limits.min, limits.max)).to(dtype)


def as_exact(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a result of a float64 pass, on the CPU, in float64.

    The smallest and the largest number of float64, as masks have them, become those of `dtype`.
    """
    with _disable_current_modes():
        if not result.is_floating_point():
            return result.detach().to("cpu", copy=True)
        exact, limits = result.detach().to("cpu", torch.float64, copy=True), torch.finfo(torch.float64)
        exact[exact == limits.min], exact[exact == limits.max] = torch.finfo(dtype).min, torch.finfo(dtype).max
        return exact
