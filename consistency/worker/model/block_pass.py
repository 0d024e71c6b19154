"""A pass of a model in which every block computes on given values: the same for every device.

From end to end errors accumulate, and a trained model amplifies them until nothing is sharp. So a pass in float64
rounds what enters and what leaves each block to the tested dtype, and keeps it; every other pass goes on with these
values at the same places. Then each block is a function by itself, the first wrong one is the only wrong one, and what
lies outside of the blocks (embeddings, masks, rotary tables, the final norm, the head) is one more: its results are
what enters the blocks, and the model's outputs.
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
    """A result of a pass."""

    layer: str
    """The module by its name in the base, or an output of the model."""
    part: str = ""
    """Empty for its first output; `output.1` for another, `input.attention_mask` for what enters a block, with the
    number of the call where it is not the first."""

    def __str__(self) -> str:
        return f"{self.layer}::{self.part}"

    @classmethod
    def of(cls, name: str) -> ResultPlace:
        return cls(*name.split("::"))


Given = Callable[[str, torch.Tensor], torch.Tensor]
"""Called with the name of a value that enters or leaves a block, and the value; returns that to go on with."""

_COLLECTING = "transformers.utils.output_capturing"

Take = Callable[[ResultPlace, torch.Tensor], None]

BlockBegan = Callable[[int, int, float], None]
"""Called when a block begins: with its number from 1, how many there are, and which share of the pass is done.

A pass that goes back counts down. A block that is called several times, as ALBERT's only one, has a number for each
call.
"""


def no_listener(number: int, count: int, share: float) -> None:
    """Tell nobody which block a pass is in."""


def run_by_blocks(
    model: torch.nn.Module, inputs: Activations, given: Given, take: Take, *, began: BlockBegan = no_listener
) -> None:
    """Run a model on inputs, each block on what is given, and hand over every result, on its device."""
    blocks = BlockPass(given, take, began=began)
    with torch.no_grad(), without_gradients(model), blocks.following(model):
        for name, output in outputs(model, inputs).items():
            take(ResultPlace(name), output)


@contextmanager
def computing_on(model: torch.nn.Module, given: Given, take: Take) -> Iterator[None]:
    """Let the blocks of a model compute on what is given."""
    with BlockPass(given, take).following(model):
        yield


class BlockPass:
    """A pass in which hooks replace what enters and leaves each block, and hand over every result."""

    share_of_forward = 1.0
    """Which share of the pass runs forward."""

    def __init__(self, given: Given, take: Take, *, began: BlockBegan = no_listener) -> None:
        self._given = given
        self._take = take
        self._began = began
        self._blocks = 0
        self._blocks_begun = 0
        self._calls: dict[str, int] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin_again(self) -> None:
        """Begin another call of the model: what was known of the one before is not."""
        self._calls.clear()
        self._known.clear()

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Follow the blocks of a model."""
        blocks = blocks_of(model)
        self._blocks = len(blocks)
        with ExitStack() as hooks:
            for name, block in blocks.items():
                self._follow(name, block, hooks)
            yield

    def _follow(self, name: str, block: torch.nn.Module, hooks: ExitStack) -> None:
        try:
            parameters = [*inspect.signature(block.forward).parameters]
        except (TypeError, ValueError):
            parameters = []

        def begin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            keys = [parameters[i] if i < len(parameters) else str(i) for i in range(len(args))]
            return self._begin(name, block, list(zip(keys, args, strict=True)), kwargs)

        def end(_: Any, __: Any, found: Any) -> Any:
            return self._end(name, found)

        hooks.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
        self._follow_children(name, block, hooks)
        hooks.callback(block.register_forward_hook(end).remove)
        # in its first pass transformers puts hooks in place that collect hidden states: of what is given, in all passes
        for number, hook in list(block._forward_hooks.items()):
            if getattr(hook, "__module__", "") == _COLLECTING:
                block._forward_hooks[number] = block._forward_hooks.pop(number)

    def _follow_children(self, name: str, block: torch.nn.Module, hooks: ExitStack) -> None:
        """Watch the modules in a block."""
        for part, child in parts_of(block).items():
            hooks.callback(child.register_forward_hook(self._inside(name, f"{name}.{part}")).remove)

    def _begin(
        self,
        name: str,
        block: torch.nn.Module,  # noqa: ARG002 - for a pass that goes back
        args: list[tuple[str, Any]],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a block gets in place of its arguments."""
        done = self._blocks_begun
        self._blocks_begun += 1
        count = max(self._blocks, self._blocks_begun)
        self._began(self._blocks_begun, count, self.share_of_forward * done / count)
        self._calls[name] = self._calls.get(name, 0) + 1
        new = [self._entering(name, key, value) for key, value in args]
        return tuple(new), {key: self._entering(name, key, value) for key, value in kwargs.items()}

    def _end(self, name: str, found: Any) -> Any:
        """Return what others get in place of a block's output."""
        leaves, structure = _pytree.tree_flatten(found)
        number = 0
        for i, leaf in enumerate(leaves):
            if is_real(leaf):
                leaves[i] = self._passed_on(name, f"output.{number}" if number else "", leaf)
                number += 1
        return _pytree.tree_unflatten(leaves, structure)

    def _entering(self, block: str, key: str, value: Any) -> Any:
        leaves, structure = _pytree.tree_flatten(value)
        several = sum(isinstance(leaf, torch.Tensor) for leaf in leaves) > 1
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[i] = self._passed_on(block, f"input.{key}.{i}" if several else f"input.{key}", leaf)
        return _pytree.tree_unflatten(leaves, structure)

    def _inside(self, block: str, layer: str) -> Callable[..., None]:
        def note(_: Any, __: Any, found: Any) -> None:
            first = next((leaf for leaf in _pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)), None)
            if first is not None and first.is_floating_point():
                self._take(self._place(block, layer, ""), first)

        return note

    def _passed_on(self, block: str, part: str, value: torch.Tensor) -> torch.Tensor:
        """Return what a block goes on with: of a tensor that several get, and of what another block left, the same."""
        if id(value) in self._known:
            return self._known[id(value)][1]
        place = self._place(block, block, part)
        self._take(place, value)
        # a copy: a block may write into what it gets
        result = self._given(str(place), value).clone() if value.is_floating_point() else value
        for one in (value, result):  # kept, so that no other tensor gets its identity
            self._known[id(one)] = one, result
        return result

    def _place(self, block: str, layer: str, part: str) -> ResultPlace:
        call = self._calls.get(block, 1)
        return ResultPlace(layer, part if call == 1 else f"{part}@{call}")


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a value in a dtype; what is finite stays so, as the smallest number in a mask."""
    with _disable_current_modes():
        limits, value = torch.finfo(dtype), value.detach()
        return torch.where(value.isinf(), value, value.clamp(limits.min, limits.max)).to(dtype)


def as_exact(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a result of a float64 pass; the smallest number of float64, as in a mask, is that of `dtype`."""
    with _disable_current_modes():
        if not result.is_floating_point():
            return result.detach().to("cpu", copy=True)
        found, ends = result.detach().to("cpu", torch.float64, copy=True), torch.finfo(torch.float64)
        found[found == ends.min], found[found == ends.max] = torch.finfo(dtype).min, torch.finfo(dtype).max
        return found
