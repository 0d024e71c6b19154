"""What a model is besides the values of its tensors: noted after loading, and put back when an adapter is taken off.

PEFT's own `unload` does not undo everything, and some methods have none: adapters replace modules, wrap `forward`, hang
hooks and attributes on modules, freeze parameters, resize embeddings and edit the config. So nothing is asked of PEFT:
each module gets back the very objects that it had.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from consistency.numerics.identity import storage_of
from consistency.worker.model.running import base_of
from consistency.worker.quantized.held import is_composite

_CONTAINERS = (dict, OrderedDict, list, set)  # these alone: a registry of a library is nobody's to empty


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorFacts:
    """What a tensor is besides its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: type

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorFacts:
        return cls(
            shape=tensor.shape,
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
            kind=type(tensor),
        )


class Structure:
    """The modules of a model with their parameters, buffers, attributes, hooks and configs, as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, _TensorFacts, dict[str, Any]]] = []
        self._note(model, set())
        self._shared = _sharing(tensor for tensor, _, _ in self._tensors)

    def restore(self) -> bool:
        """Put everything back; return whether that was possible. The values of tensors stay as they were left."""
        for owner, attributes in self._attributes:
            vars(owner).clear()
            vars(owner).update(attributes)
        for container, content in self._contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for tensor, facts, attributes in self._tensors:
            tensor.grad = None
            if tensor.requires_grad != facts.requires_grad:
                tensor.requires_grad_(facts.requires_grad)
            vars(tensor).clear()
            vars(tensor).update(attributes)
            if _TensorFacts.of(tensor) != facts:
                tensor.data = torch.empty(facts.shape, dtype=facts.dtype, device=facts.device)
        sound = all(_TensorFacts.of(tensor) == facts for tensor, facts, _ in self._tensors)
        return sound and _sharing(tensor for tensor, _, _ in self._tensors) == self._shared

    def _note(self, value: Any, seen: set[int]) -> None:
        """Note a value and all that it holds, each once; what is neither container, module nor config is left alone."""
        if id(value) in seen:
            return
        seen.add(id(value))
        held: list[Any] = []
        if isinstance(value, torch.Tensor):
            self._tensors.append((value, _TensorFacts.of(value), dict(vars(value))))
        elif type(value) in _CONTAINERS:
            self._contents.append((value, value.copy()))
            held = list(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, torch.nn.Module) or _is_config(value):
            self._attributes.append((value, dict(vars(value))))
            held = list(vars(value).values())
        for one in held:
            self._note(one, seen)


def _is_config(value: Any) -> bool:
    # those of every library can be written as a dictionary
    return hasattr(value, "to_dict") and hasattr(value, "__dict__") and not isinstance(value, type)


def _sharing(tensors: Iterable[torch.Tensor]) -> set[frozenset[int]]:
    """Return which tensors lie in the same memory: `.data` of one of them can be replaced, and not of the others."""
    together: defaultdict[tuple[torch.device, int], set[int]] = defaultdict(set)
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta and not is_composite(tensor):
            together[tensor.device, storage_of(tensor)].add(id(tensor))
    return {frozenset(group) for group in together.values() if len(group) > 1}


def blocks_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of the outermost lists of modules, by name in the base: decoder layers, stages, blocks."""
    found: dict[str, torch.nn.Module] = {}
    left, start = [("", model)], prefix_of_base(model)
    while left:
        prefix, module = left.pop(0)
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(child, torch.nn.ModuleList):
                place = path.removeprefix(start)
                found.update((f"{place}.{i}", block) for i, block in child.named_children() if not _holds_alone(block))
            else:
                left.append((path, child))
    return found


def prefix_of_base(model: torch.nn.Module) -> str:
    """Return how the names of the base's modules begin in an adapted model, which depends on the method; else empty."""
    name = next(name for name, module in model.named_modules() if module is base_of(model))
    return name and f"{name}."


def parts_of(block: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules in a block that hold parameters, by name: attention, MLP, norms; of a list, each in it."""
    found: dict[str, torch.nn.Module] = {}
    for name, child in block.named_children():
        if _holds_alone(child):
            found.update((f"{name}.{part}", module) for part, module in parts_of(child).items())
        elif any(True for _ in child.parameters()):
            found[name] = child
    return found


def _holds_alone(block: torch.nn.Module) -> bool:
    return isinstance(block, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList)
