"""Note a model's structure, all but the values of its tensors, after loading; restore it when an adapter is taken off.

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

_CONTAINERS = (dict, OrderedDict, list, set)
"""Types of containers whose content is restored; of others, such as a library's registry, it is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorFacts:
    """The properties of a tensor besides its values."""

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
        """Modules and configs, each with a copy of its attributes."""
        self._contents: list[tuple[Any, Any]] = []
        """Containers, each with a copy."""
        self._tensors: list[tuple[torch.Tensor, _TensorFacts, dict[str, Any]]] = []
        """Tensors, each with its properties and a copy of its attributes."""
        self._note(model, set())
        self._shared = _sharing(tensor for tensor, _, _ in self._tensors)

    def restore(self) -> bool:
        """Put everything back; return whether that was possible. The values of tensors stay as they were left."""
        for owner, attributes in self._attributes:
            vars(owner).clear()
            vars(owner).update(attributes)
        for container, content in self._contents:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        for tensor, facts, attributes in self._tensors:
            tensor.grad = None
            if tensor.requires_grad != facts.requires_grad:
                tensor.requires_grad_(facts.requires_grad)
            vars(tensor).clear()
            vars(tensor).update(attributes)
            if _TensorFacts.of(tensor) != facts:
                # another shape, dtype or device: memory of the right kind, whose values the caller takes from the file
                tensor.data = torch.empty(facts.shape, dtype=facts.dtype, device=facts.device)
        has_facts = all(_TensorFacts.of(tensor) == facts for tensor, facts, _ in self._tensors)
        return has_facts and _sharing(tensor for tensor, _, _ in self._tensors) == self._shared

    def _note(self, value: Any, visited: set[int]) -> None:
        """Note a value and everything inside it, each once; leave alone what is no tensor, container, module or config.

        Parameters
        ----------
        visited : set of int
            Identities of the values that were noted.
        """
        if id(value) in visited:
            return
        visited.add(id(value))
        inner: list[Any] = []
        if isinstance(value, torch.Tensor):
            self._tensors.append((value, _TensorFacts.of(value), dict(vars(value))))
        elif type(value) in _CONTAINERS:
            self._contents.append((value, value.copy()))
            inner = list(value.values()) if isinstance(value, dict) else list(value)
        elif isinstance(value, torch.nn.Module) or _is_config(value):
            self._attributes.append((value, dict(vars(value))))
            inner = list(vars(value).values())
        for inner_value in inner:
            self._note(inner_value, visited)


def _is_config(value: Any) -> bool:
    # configs of every library can be written as a dictionary
    return hasattr(value, "to_dict") and hasattr(value, "__dict__") and not isinstance(value, type)


def _sharing(tensors: Iterable[torch.Tensor]) -> set[frozenset[int]]:
    """Return the groups of tensors, by identity, that lie in the same memory.

    `.data` of one of them can be replaced while that of the others is not.
    """
    ids_by_storage: defaultdict[tuple[torch.device, int], set[int]] = defaultdict(set)
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta and not is_composite(tensor):
            ids_by_storage[tensor.device, storage_of(tensor)].add(id(tensor))
    return {frozenset(ids) for ids in ids_by_storage.values() if len(ids) > 1}


def blocks_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of the outermost lists of modules, by name in the base: decoder layers, stages, blocks.

    Lists are found from the outside in; of a list of lists, the inner lists are no blocks.
    """
    blocks: dict[str, torch.nn.Module] = {}
    remaining, prefix_in_model = [("", model)], prefix_of_base(model)
    while remaining:
        parent, module = remaining.pop(0)
        for name, child in module.named_children():
            path = f"{parent}.{name}" if parent else name
            if not isinstance(child, torch.nn.ModuleList):
                remaining.append((path, child))
                continue
            name_in_base = path.removeprefix(prefix_in_model)
            for number, block in child.named_children():
                if not _is_container(block):
                    blocks[f"{name_in_base}.{number}"] = block
    return blocks


def prefix_of_base(model: torch.nn.Module) -> str:
    """Return the prefix of the base's names in an adapted model, which depends on the method; empty of a base."""
    name = next(name for name, module in model.named_modules() if module is base_of(model))
    return name and f"{name}."


def parts_of(block: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules in a block that have parameters, by name: attention, MLP, norms; of a list, its members."""
    parts: dict[str, torch.nn.Module] = {}
    for name, child in block.named_children():
        if _is_container(child):
            for inner_name, inner in parts_of(child).items():
                parts[f"{name}.{inner_name}"] = inner
        elif any(True for _ in child.parameters()):
            parts[name] = child
    return parts


def _is_container(block: torch.nn.Module) -> bool:
    """Report whether a module only holds others, and computes nothing itself."""
    return isinstance(block, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList)
