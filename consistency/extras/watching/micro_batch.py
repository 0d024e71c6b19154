"""The micro-batches of a step as the model got them, and a pass of one once more that leaves no trace.

A hook before the model's forward pass notes arguments, the state of every generator and the autocast that is on. A pass
once more has all of these. It takes gradients by `torch.autograd.grad`, so no `.grad` changes and no collective of
DistributedDataParallel begins; buffers that it writes to are put back, and so are the generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree

from consistency.numerics.digest import digest
from consistency.worker import determinism
from consistency.worker.model.structure import blocks_of, prefix_of_base

LOSS = "loss"
OUTPUT = "output"
_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
_GRADIENT_OF = "gradient of "
INCOMING = f"{_GRADIENT_OF}the output"


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states of the generators that a forward pass may draw from."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    card: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> GeneratorStates:
        """Return the states as they are."""
        card = None
        if device.type not in ("cpu", "meta"):
            card = torch.get_device_module(device).get_rng_state(device)
        numpy_state = np.random.get_state()  # noqa: NPY002 - models draw from the global generator
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), card)

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if self.card is not None:
            torch.get_device_module(device).set_rng_state(self.card, device)


@dataclass(slots=True, kw_only=True)
class PassMarks:
    """What a pass left: digests of results and gradients in the order in which they were computed."""

    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    """Digest by layer and tensor."""
    incoming: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradient that arrived at each output of the model from outside of it, by its number among the outputs."""
    reached: set[int] = field(default_factory=set)
    """Outputs at which any gradient arrived, be it from another output that is computed from them."""

    def note(self, layer: str, name: str, tensor: torch.Tensor) -> None:
        """Note the digest of a tensor, unless there is one: a checkpointed block computes twice."""
        if tensor.layout is not torch.strided:  # a sparse gradient of an embedding
            return
        self.digests.setdefault((layer, name), digest(tensor.detach()).value)

    @property
    def has_gradients(self) -> bool:
        """Whether the pass has a gradient, be it of a block's output or of a parameter."""
        return any(name.startswith(_GRADIENT_OF) for _, name in self.digests)

    def of_forward_pass(self) -> PassMarks:
        """Return what the forward pass left, without gradients."""
        forward = {place: value for place, value in self.digests.items() if not place[1].startswith(_GRADIENT_OF)}
        return PassMarks(digests=forward)

    def first_difference(self, other: PassMarks) -> tuple[str, str] | None:
        """Return the first place at which another pass has other bits; None where both are equal."""
        for place, value in self.digests.items():
            if other.digests.get(place) != value:
                return place
        return None


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One call of the model in a training step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generators: GeneratorStates
    autocast: tuple[str, torch.dtype] | None
    marks: PassMarks | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the batch, in their order."""
        leaves = _pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def digest(self) -> str:
        """Return one digest of all tensors of the batch but those of a single number, which all ranks have alike."""
        return " ".join(digest(tensor).value for tensor in self.tensors() if tensor.numel() > 1)

    @contextmanager
    def conditions(self, device: torch.device) -> Iterator[None]:
        """Compute as the training did for this micro-batch: the same draws, the same autocast."""
        with ExitStack() as stack:
            stack.enter_context(determinism.seeded())  # puts the generators back at the end
            self.generators.restore(device)
            if self.autocast is not None:
                kind, dtype = self.autocast
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            stack.enter_context(torch.enable_grad())
            yield


class WatchedModel:
    """The model of a training, unwrapped, with what is asked of it in every step.

    Parameters
    ----------
    model : torch.nn.Module
        The model; a wrapper such as DistributedDataParallel is taken off.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._wrapper = model
        self.model = unwrapped(model)
        self.device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        self.blocks = {} if _is_compiled(self.model) else blocks_of(self.model)
        self.is_called_compiled = False
        """Whether the training compiles something around the model, which a watch does not have."""
        self._prefix = _prefix_of_names(self.model)
        self.has_flat_parts = any(isinstance(module, FullyShardedDataParallel) for module in self.model.modules())
        """Whether each rank holds a part of every tensor, which does not say so: FSDP of the first version."""
        parts = [parameter for parameter in self.model.parameters() if isinstance(parameter, DTensor)]
        self.is_split = bool(parts) or self.has_flat_parts
        self.shares_batches = bool(parts) and not _is_data_parallel(self.model, parts)
        """Whether ranks that hold parts of one tensor compute the same batch, as with tensor parallel."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return all parameters, by the name that the model itself gives them: without the prefix of a wrapper."""
        return {self.own_name(name): tensor for name, tensor in self.model.named_parameters()}

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are trained, by name."""
        return {name: tensor for name, tensor in self.parameters().items() if tensor.requires_grad}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are alike on all ranks, by name: all but what a rank keeps of its own batches."""
        own_of_rank = set(_statistics_of_batches(self.model))
        return {self.own_name(name): tensor for name, tensor in self.model.named_buffers() if name not in own_of_rank}

    def own_name(self, name: str) -> str:
        """Return the name that the model itself gives a parameter or a module of the wrapped one."""
        return _without_wrappers(name).removeprefix(self._prefix)

    def compression(self) -> str:
        """Return the hook of torch's by which DistributedDataParallel adds up less than the gradients; empty for none.

        A hook of another's is not taken for wanted: that sums are right is what is checked.
        """
        for hook, _ in getattr(self._wrapper, "_comm_hooks", []):
            name = getattr(hook, "__qualname__", "").partition(".")[0]
            if getattr(hook, "__module__", "").startswith(_HOOKS_OF_TORCH) and name != "allreduce_hook":
                return name
        return ""

    def block_of(self, layer: str) -> str:
        """Return the block that a layer is, or lies in, by either name of the layer; empty where it is in none."""
        for name in self.blocks:
            if f".{name}." in f".{layer}.":
                return name
        return ""

    def batch_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MicroBatch:
        """Return a call of the model as a micro-batch, with the conditions of this moment."""
        kind, autocast = self.device.type, None
        if torch.is_autocast_enabled(kind):
            autocast = (kind, torch.get_autocast_dtype(kind))
        states = GeneratorStates.now(self.device)
        return MicroBatch(args=args, kwargs=dict(kwargs), generators=states, autocast=autocast)

    @contextmanager
    def marked(self, marks: PassMarks) -> Iterator[None]:
        """Note the results and gradients of the passes inside."""
        remove = self.mark(marks)
        try:
            yield
        finally:
            remove()

    def mark(self, marks: PassMarks) -> Callable[[], None]:
        """Note the results and gradients of the next pass; return what ends it."""
        handles: list[Any] = []
        for name, block in self.blocks.items():
            handles.append(block.register_forward_hook(_noting_output(name, marks)))
        handles.append(self.model.register_forward_hook(not_compiled(_noting_outputs_of_model(marks))))
        for name, parameter in self.trainable().items():
            layer, _, tensor = name.rpartition(".")
            handles.append(parameter.register_hook(_noting_gradient(layer, f"{_GRADIENT_OF}{tensor}", marks)))

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def repeat(self, batch: MicroBatch, incoming: Mapping[int, torch.Tensor]) -> PassMarks:
        """Compute a micro-batch once more, forward and backward, and leave no trace.

        Parameters
        ----------
        incoming : mapping of int to torch.Tensor
            Gradient that arrives at each output of the model; empty for a forward pass alone.
        """
        marks = PassMarks()
        with buffers_kept(self.model), batch.conditions(self.device), self.marked(marks):
            outputs = differentiable_outputs(self.model(*batch.args, **batch.kwargs))
            if incoming:
                wanted = [outputs[number] for number in incoming]
                parameters = list(self.trainable().values())
                torch.autograd.grad(wanted, parameters, list(incoming.values()), allow_unused=True)
        return marks


def not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile calls as it is: a model that compiles its own call would compile hooks too."""
    result: Callable[..., None] = torch.compiler.disable(hook)
    return result


def is_inside_compiled_call() -> bool:
    """Report whether the hook that asks, itself one of `not_compiled`, is called by a compiled call.

    Trainers compile a wrapper of the model that they give to callbacks, in which nothing says so.
    """
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        calls += frame.f_code.co_filename.endswith(_CALLS_OF_DYNAMO)
        frame = frame.f_back
    return calls > 1  # one is that of the hook


_CALLS_OF_DYNAMO = str(Path("torch", "_dynamo", "eval_frame.py"))


def _noting_output(name: str, marks: PassMarks) -> Callable[..., None]:
    def note(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is None:
            return
        marks.note(name, OUTPUT, tensor)
        if tensor.requires_grad:
            tensor.register_hook(_noting_gradient(name, INCOMING, marks))

    return note


def _noting_outputs_of_model(marks: PassMarks) -> Callable[..., None]:
    def note(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        outputs = differentiable_outputs(output)
        computed_from = _outputs_by_source(outputs)
        for number, tensor in outputs.items():
            marks.note("", f"{OUTPUT} {number}" if number else LOSS, tensor)
            tensor.register_hook(_keeping(number, computed_from[number], marks))

    return note


_GradientHook = Callable[[torch.Tensor | None], None]


def _noting_gradient(layer: str, name: str, marks: PassMarks) -> _GradientHook:
    def note(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            marks.note(layer, name, gradient)

    return note


def _keeping(number: int, computed_from: set[int], marks: PassMarks) -> _GradientHook:
    """Return a hook that keeps the gradient of an output, unless it comes from outputs that are computed from it.

    A loss is computed from logits, and keys and values of a cache go into logits: a pass once more that begins at both
    would count their gradient twice.
    """

    def keep(gradient: torch.Tensor | None) -> None:
        if gradient is None:  # a function of its own, such as TRL's of a loss, gives none to what is not used
            return
        if not computed_from & marks.reached:
            marks.incoming[number] = gradient.detach()
        marks.reached.add(number)

    return keep


def differentiable_outputs(output: Any) -> dict[int, torch.Tensor]:
    """Return what a loss may be made of: all outputs that have a gradient; number 0 is the model's own loss."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    leaves = _pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbered = {number: tensor for number, tensor in enumerate(tensors, 1) if tensor is not loss}
    if isinstance(loss, torch.Tensor):
        numbered = {0: loss, **numbered}
    return {number: tensor for number, tensor in numbered.items() if tensor.requires_grad}


def _outputs_by_source(outputs: Mapping[int, torch.Tensor]) -> dict[int, set[int]]:
    """Return, for each output, the outputs that are computed from it with no other output between them."""
    number_of = {tensor.grad_fn: number for number, tensor in outputs.items() if tensor.grad_fn is not None}
    by_source: dict[int, set[int]] = {number: set() for number in outputs}
    for number, tensor in outputs.items():
        if tensor.grad_fn is None:
            continue
        visited = {tensor.grad_fn}
        waiting = [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            for source, _ in node.next_functions:
                if source is None or source in visited:
                    continue
                visited.add(source)
                if source in number_of:
                    by_source[number_of[source]].add(number)
                else:
                    waiting.append(source)
    return by_source


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of a module's result."""
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None


@contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back every buffer that a pass writes to or replaces, such as the statistics of a batch norm."""
    before = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in _own_buffers(module)
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in before:
            module._buffers[name] = buffer
            if digest(buffer).value != digest(values).value:
                with torch.no_grad():
                    buffer.copy_(values)


def _own_buffers(module: torch.nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of DistributedDataParallel and of others that hold one `module`."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        model = model.module
    return model


def _is_compiled(model: torch.nn.Module) -> bool:
    """Report whether any module is compiled: a hook that comes later is not seen there."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names by which wrappers of torch hold the module inside of them: compiled, sharded, checkpointed."""


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _prefix_of_names(model: torch.nn.Module) -> str:
    """Return what data-parallel wrappers and PEFT put before the names of the model inside of them."""
    prefix, inner = "", model
    while True:
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            prefix, inner = f"{prefix}module.", inner.module
        elif any(hasattr(inner, name) for name in _WRAPPERS):
            inner = next(getattr(inner, name) for name in _WRAPPERS if hasattr(inner, name))
        else:
            return prefix + _without_wrappers(prefix_of_base(inner))


def _statistics_of_batches(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names of running means and variances, which each rank takes of its own batches.

    DistributedDataParallel gives them those of the first rank before each pass, FSDP2 never; only a `SyncBatchNorm`
    has the same on all.
    """
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and not isinstance(module, torch.nn.SyncBatchNorm):
            prefix = f"{name}." if name else ""
            yield from (f"{prefix}{buffer}" for buffer, _ in module.named_buffers(recurse=False))


def _is_data_parallel(model: torch.nn.Module, parts: Sequence[DTensor]) -> bool:
    """Report whether a model is split by FSDP2 alone: tensor parallel beside it splits a tensor a second time."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    return all(sum(not placement.is_replicate() for placement in part.placements) < 2 for part in parts)
