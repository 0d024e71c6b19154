"""Every tensor that a module keeps alive, registered or not, and the storages under them.

A tensor in a list, a dict or a plain attribute of a wrapper is in no state dict and takes as much memory. Tensors that
only a closure holds are not found.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of
from consistency.numerics.identity import storage_of

_MACHINERY = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_DEPTH = 6  # nested containers; no weights are kept deeper

_LEAST_BYTES = 64
"""Smaller tensors are equal by chance: flags, counters, scalars."""

Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The tensors that a module keeps alive, and the storages under them.

    A tensor of a subclass stands for the plain tensors that it is made of.

    Attributes
    ----------
    tensors : dict
        Plain tensors by their names.
    storages : dict
        Names of the tensors on each storage, by device and storage.
    """

    tensors: dict[str, torch.Tensor]
    storages: dict[Place, tuple[str, ...]]

    @classmethod
    def by(cls, module: torch.nn.Module) -> Held:
        tensors: dict[str, torch.Tensor] = {}
        storages: dict[Place, tuple[str, ...]] = {}
        for name, tensor in _walk("", module, set(), _DEPTH):
            if tensor.is_meta or tensor.layout is not torch.strided or name in tensors:
                continue
            tensors[name] = tensor
            place = (str(tensor.device), storage_of(tensor))
            storages[place] = (*storages.get(place, ()), name)
        return cls(tensors=tensors, storages=storages)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_dtype.values())

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Return the bytes of the storages by dtype, the largest first."""
        nbytes: Counter[str] = Counter()
        for names in self.storages.values():
            tensor = self.tensors[names[0]]
            nbytes[name_of(tensor.dtype)] += tensor.untyped_storage().nbytes()
        return dict(nbytes.most_common())

    def by_content(self) -> dict[tuple[str, tuple[int, ...], str], list[str]]:
        """Return one name per storage, by dtype, shape and digest of its tensor."""
        names_by_content: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
        for names in self.storages.values():
            tensor = self.tensors[names[0]]
            if tensor.nbytes >= _LEAST_BYTES:
                key = (name_of(tensor.dtype), tuple(tensor.shape), digest(tensor.detach()).value)
                names_by_content.setdefault(key, []).append(names[0])
        return names_by_content


def held_twice(wrapped: Held, plain: Held) -> list[tuple[str, str]]:
    """Return pairs of names with the same bytes in two storages, where the plain model has one.

    Weights that the plain model ties share one storage on both sides; weights that happen to be equal, such as norms of
    ones, have the same number of storages on both sides.
    """
    if set(wrapped.storages) <= set(plain.storages):
        return []
    plain_names = plain.by_content()
    copies = []
    for content, names in wrapped.by_content().items():
        if content in plain_names:
            copies += [(names[0], name) for name in names[len(plain_names[content]) :]]
    return copies


def _walk(name: str, value: Any, visited: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of everything inside a value, as far as `depth` containers deep.

    `visited` has the ids of the containers that were entered: modules refer to each other in circles.
    """
    if isinstance(value, torch.Tensor):
        yield from _plain_tensors(name, value)
        return
    if depth == 0 or id(value) in visited:
        return
    inside: dict[Any, Any] = {}
    depth -= 1
    if isinstance(value, torch.nn.Module):
        depth = _DEPTH  # modules may be nested to any depth
        inside = {**value._parameters, **value._buffers, **value._modules}
        inside |= {key: item for key, item in vars(value).items() if key not in _MACHINERY}
    elif isinstance(value, Mapping):
        inside = dict(value)
    elif isinstance(value, (list, tuple, set)):
        inside = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # the state of a bitsandbytes layer
        inside = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if inside:
        visited.add(id(value))
    for key, item in inside.items():
        yield from _walk(_join(name, str(key)), item, visited, depth)


def _plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors of a tensor: itself, or the parts of a subclass such as quantized weights."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for attribute in attributes:
            inner = getattr(tensor, attribute)
            if isinstance(inner, torch.Tensor):
                yield from _plain_tensors(_join(name, attribute), inner)
    else:
        yield name, tensor
    for key, item in vars(tensor).items():  # scales, and the rows of a bitsandbytes weight
        if isinstance(item, torch.Tensor) and key != "grad":
            yield from _plain_tensors(_join(name, key), item)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
