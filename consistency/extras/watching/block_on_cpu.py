"""Check 4: one block in turn, with the inputs and the arriving gradient that it really had, against the CPU.

The block computes once more on its device, forward and backward, and on the CPU in float64 and with noise. What it is
off by is judged by the rule `block`. Dropout is switched off, since a card draws other numbers than the CPU, and one
sequence of the batch is taken: so the CPU's part takes about as long as a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from consistency.errors import first_line
from consistency.extras.watching.kinds import WRONG_BLOCK
from consistency.extras.watching.micro_batch import MicroBatch, WatchedModel, buffers_kept, first_tensor
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names
from consistency.testing.result import ResultError
from consistency.testing.within import within_rounding

PASSES = 4
"""Passes with noise: a block's results have many rows, and the check must not take long."""

_CACHES = ("past_key_values", "past_key_value", "cache_position", "layer_past", "cache")
"""Arguments that hold what earlier tokens left: there are none in a training, and a block would add to them."""


@dataclass(slots=True, kw_only=True)
class BlockInputs:
    """What entered a block in a pass, and the gradient that arrived at its output."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    incoming: torch.Tensor | None = None


def check_block(
    watched: WatchedModel,
    batch: MicroBatch | None,
    name: str,
    talk: RankTalk,
    between: str,
    noted: BlockInputs | None = None,
    keep_in: Path | None = None,
) -> CheckOutcome:
    """Judge one block of the model by the CPU.

    Parameters
    ----------
    noted : BlockInputs, optional
        What the block had in the training's own pass; by default a pass of the model once more tells it.
    keep_in : path, optional
        File for the tensors of a block that is wrong.
    """
    outcome = CheckOutcome(check="the CPU says the same", figures={"block": name})
    outcome.not_checked = _why_not(watched, batch, name, noted)
    if outcome.not_checked or batch is None:
        return outcome
    try:
        block = watched.blocks[name]
        state = whole_state(block)  # first, since all ranks have to do it
        if noted is None and batch.marks is not None:
            noted = inputs_of_block(watched, batch, name, batch.marks.incoming)
        if noted is None or noted.kwargs is None or noted.incoming is None:
            outcome.not_checked = "no gradient arrived at the block"
            return outcome
        with batch.conditions(watched.device), buffers_kept(block):
            function = function_of(block, state, noted)
            results = judge_block(function)
    except Exception as error:  # model code may raise anything, and the training is to go on
        outcome.not_checked = f"the block cannot be computed by itself: {first_line(error)}"
        return outcome
    outcome.figures["ratio"] = max((result.ratio for result in results), default=0.0)
    wrong = [result for result in results if result.status == "outside"]
    if wrong:
        wrong.sort(key=lambda result: -result.ratio)
        worst = wrong[0]
        kept = "" if keep_in is None else _kept(keep_in, state, noted)
        outcome.discoveries.append(
            Discovery(
                kind=WRONG_BLOCK,
                message=f"{rank_names([talk.rank])} computes {name} wrong: its {title_of(worst.name)} is off by "
                f"{worst.ratio:.3g} times what rounding may do, against float64 on the CPU: {between}",
                ranks=(talk.rank,),
                tensors=tuple((name, title_of(result.name)) for result in wrong),
                ratio=worst.ratio,
                detail=(*str(replace(worst, name=title_of(worst.name))).splitlines(), *([kept] if kept else [])),
                next="test that card (consistency run --devices cpu,cuda --stages forward,gradient with this base and "
                "adapter); take it out if it says the same",
            )
        )
        outcome.wrong_block = WrongBlock(function=function, name=name, batch=batch)
    return outcome


def _kept(file: Path, state: Mapping[str, torch.Tensor], inputs: BlockInputs) -> str:
    """Write what a block was judged with, and say where: another card can compute it again."""
    tensors = {f"weight {name}": tensor for name, tensor in state.items()}
    for path, leaf in _pytree.tree_flatten_with_path((inputs.args, inputs.kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            tensors[f"input {_pytree.keystr(path)}"] = leaf
    if inputs.incoming is not None:
        tensors["gradient of the output"] = inputs.incoming
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # a copy each: the format has no two tensors in the same memory
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, file)
    except (OSError, SafetensorError, ValueError) as error:  # a full disk ends no training
        return f"its inputs and weights could not be written: {first_line(error)}"
    return f"its inputs, the gradient that arrived and its weights: {file}"


def _why_not(watched: WatchedModel, batch: MicroBatch | None, name: str, noted: BlockInputs | None) -> str:
    if batch is None:
        return "no forward pass of the model was seen in this step"
    if watched.is_split:
        return "" if noted is not None else "the model is split, and not by FSDP2 into its blocks"
    if not name:
        return "the model is compiled, or has no list of blocks"
    if batch.marks is None or not batch.marks.incoming:
        return "no gradient arrived at the model's outputs"
    return ""


def title_of(result: str) -> str:
    """Return the name of a result of a block: `output` for `result['output']`."""
    return result.removeprefix("result['").removesuffix("']")


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
    compute : callable
        Takes `inputs`; returns the block's output, and the gradients of its input and its trainable parameters.
    state : dict of str to torch.Tensor
        The block's parameters and buffers, whole.
    inputs : tuple
        `state`, the first sequence of the arguments by position and by name, and that of the gradient that arrives.
    """

    block: torch.nn.Module
    compute: Callable[..., dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    inputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBlock:
    """A block that was found wrong, as long as the weights are those of the pass.

    Attributes
    ----------
    function : BlockFunction
        The block with its inputs.
    name : str
        Name of the block.
    batch : MicroBatch
        The micro-batch whose autocast it computes in.
    """

    function: BlockFunction
    name: str
    batch: MicroBatch


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
    trained = {name for name, parameter in block.named_parameters() if parameter.requires_grad}
    whole = dict(state)
    arguments = _first_row(inputs.args, rows), _first_row(inputs.kwargs, rows)
    return BlockFunction(
        block=block,
        compute=_forward_and_backward(block, trained),
        state=whole,
        inputs=(whole, *arguments, inputs.incoming[:1]),
    )


def judge_block(function: BlockFunction) -> tuple[ResultError, ...]:
    """Return the errors of a block's results."""
    with without_dropout(function.block):
        return within_rounding(function.compute, *function.inputs, gradients=False, passes=PASSES, calls=1).results


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
