"""NaN and infinity in a merged folder: whether they are the adapter's, the base's, or made by the merge.

Every comparison with NaN is false, and a value that overflowed equals every other one that did. So a rule that asks
*is it outside?* passes both. Elements that are not finite are therefore judged apart, by a rule of their own:

====================================  ==================================================================
where the adapter is not finite       the adapter is broken, and named as that; no folder of it is judged
where the base has the same value     it is right: a merge leaves it so
everywhere else                       base + adapter is finite: the merge overflowed, or made NaN
====================================  ==================================================================

Base + adapter is finite in float64 where both are: of numbers in 32 bits, K products are at most K · 1.2e77, and the
largest number of float64 is 1.8e308.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from consistency.capture.wording import counted
from consistency.extras.merging.check_merged.adapter import ByForm, ByPeft, LowRankTarget, Replaced, Target
from consistency.numerics.dtype import name_of
from consistency.numerics.not_finite import count_not_finite
from consistency.worker.model.weight_files import WeightFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteElements:
    """Elements that are NaN or infinite where base + adapter is finite.

    Attributes
    ----------
    places : torch.Tensor
        Where they are: bool, of the tensor's shape.
    index, actual, exact
        The first of them, its value, and base + adapter in float64; NaN where that has no closed form.
    dtype : torch.dtype
        The folder's.
    """

    places: torch.Tensor
    index: tuple[int, ...]
    actual: float
    exact: float
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return int(self.places.sum())

    @property
    def text(self) -> str:
        """Return how many they are, the first of them, and that its dtype is too small where it is."""
        place = ", ".join(map(str, self.index))
        text = f"{self.count} of {counted(self.places.numel(), 'element')}; [{place}] is {self.actual:g}"
        if self.exact == self.exact:
            text += f", base + adapter is {self.exact:.6g}"
        largest = torch.finfo(self.dtype).max
        if abs(self.exact) > largest:
            text += f", and the largest number of {name_of(self.dtype)} is {largest:g}"
        return text


def non_finite_elements(
    actual: torch.Tensor, base: torch.Tensor | None, target: Target | None
) -> NonFiniteElements | None:
    """Return what is not finite in a tensor of the folder although base + adapter is; None where nothing is.

    Parameters
    ----------
    actual : torch.Tensor
        The folder's tensor, of any shape and float dtype, on the CPU.
    base : torch.Tensor or None
        The base's, of the same shape; None where the base has none.
    target : Target or None
        What the adapter makes of it, all of it finite; None where the adapter leaves the tensor alone.
    """
    if not count_not_finite(actual):
        return None
    places = ~_is_finite(actual)
    if base is not None and not isinstance(target, Replaced):
        before = base.to(torch.float64)
        now = actual.to(torch.float64)
        same = (now == before) | (now.isnan() & before.isnan())
        places &= ~same
    if not bool(places.any()):
        return None
    index = tuple(int(place) for place in places.nonzero()[0])
    exact = _exact_at(index, actual.shape, base, target)
    return NonFiniteElements(places=places, index=index, actual=float(actual[index]), exact=exact, dtype=actual.dtype)


def is_target_finite(target: Target) -> bool:
    """Report whether all that the adapter has for a tensor is finite."""
    return not any(map(count_not_finite, _tensors_of(target)))


def broken_tensors(files: WeightFiles) -> Iterator[tuple[str, str]]:
    """Yield the names of an adapter's tensors that hold NaN or infinity, each with how many and where the first is."""
    for name in files.names():
        tensor = files.read(name)
        broken = count_not_finite(tensor)
        if broken:
            first = [int(place) for place in (~_is_finite(tensor)).nonzero()[0]]
            yield name, f"{broken} of {counted(tensor.numel(), 'element')}, the first at {first}"


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor is finite; torch answers that for no float of 8 bits."""
    return (tensor.to(torch.float32) if tensor.element_size() == 1 else tensor).isfinite()


def _tensors_of(target: Target) -> Iterator[torch.Tensor]:
    """Yield the adapter's tensors that a target is computed from."""
    match target:
        case LowRankTarget():
            yield from (target.left, target.right)
        case Replaced():
            yield target.value
        case ByForm():
            yield from target.files.values()
        case ByPeft():
            for layer in target.layers:
                tensors = chain(layer.named_parameters(), layer.named_buffers())
                yield from (tensor.detach() for name, tensor in tensors if not name.startswith("base_layer."))


def _exact_at(index: tuple[int, ...], shape: torch.Size, base: torch.Tensor | None, target: Target | None) -> float:
    """Return base + adapter at one element, in float64; NaN where no closed form gives it."""
    if isinstance(target, Replaced) and target.rows is None:
        return float(target.value[index])
    if isinstance(target, ByForm | ByPeft) or base is None:
        return float("nan")
    if isinstance(target, Replaced):
        assert target.rows is not None
        places = target.rows.eq(index[0]).nonzero()
        return float(target.value[(int(places[0]), *index[1:])] if len(places) else base[index])
    if target is None:
        return float(base[index])
    stack, row, column = np.unravel_index(int(np.ravel_multi_index(index, tuple(shape))), target.shape)
    delta = torch.dot(target.left[stack, row].double(), target.right[stack, :, column].double())
    return float(base[index]) + target.scaling * float(delta)
