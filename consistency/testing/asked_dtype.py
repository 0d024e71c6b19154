"""Answer a reference that asks for the dtype of a tensor: in the float64 pass it has the one that was tested.

`torch.finfo(x.dtype).min` of a mask, an epsilon that follows the dtype, and a branch that takes float32 otherwise make
another function of a reference whose inputs are float64. The tensors of the float64 pass therefore say which dtype they
would have: that of the inputs as they were rounded, or what a cast asks for, or what torch promotes operands to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_ASKS = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]

_ASKS_ITEMSIZE = (torch.Tensor.element_size, torch.Tensor.itemsize.__get__)  # type: ignore[attr-defined]

_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
}
"""Methods that convert to one dtype."""

_LIKE_ANOTHER = frozenset({torch.Tensor.type_as})
"""Methods that convert to the dtype of their last argument."""

_NORMS = frozenset({torch.rms_norm, torch.nn.functional.rms_norm})
"""Functions whose epsilon is that of the dtype where none is given, which they ask for in C++."""

_CLAIM = "_consistency_asked_dtype"
"""Attribute of a tensor in float64 that has another dtype in the tested pass."""


class AskedDtype(TorchFunctionMode):
    """Let float64 tensors say which dtype they have in a pass in the tested dtype.

    Parameters
    ----------
    tested : torch.dtype
        Dtype of tensors that come from elsewhere, as those of compiled code.
    """

    def __init__(self, tested: torch.dtype) -> None:
        super().__init__()
        self._tested = tested

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _ASKS:  # a getter is made anew each time it is looked up
            return self._dtype_of(args[0])
        if func in _ASKS_ITEMSIZE:
            return self._dtype_of(args[0]).itemsize
        if func in _NORMS:
            args, kwargs = self._with_epsilon(args, kwargs)
        result = func(*args, **kwargs)
        operands = list(_tensors((*args, *kwargs.values())))
        asked = self._asked_for(func, args, kwargs)
        is_operand = any(result is operand for operand in operands)
        if asked is not None and is_operand and self._dtype_of(result) != asked:
            result = torch.ops.aten.alias(result)  # a cast to float64 returns what is float64 already
        self._mark(result, operands, asked)
        return result

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that a tensor has in the tested pass."""
        if tensor.dtype != torch.float64:
            return tensor.dtype
        claimed: torch.dtype = getattr(tensor, _CLAIM, self._tested)
        return claimed

    def _with_epsilon(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `rms_norm` with the epsilon that it takes in the tested pass."""
        names = ("input", "normalized_shape", "weight", "eps")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if named.get("eps") is None:
            named["eps"] = _default_epsilon(self._dtype_of(named["input"]))
        return tuple(named[name] for name in names[:2]), {name: named.get(name) for name in names[2:]}

    def _mark(self, result: Any, operands: Sequence[torch.Tensor], asked: torch.dtype | None) -> None:
        """Note on the float64 tensors among results which dtype they have in the tested pass."""
        wide = [tensor for tensor in _tensors((result,)) if tensor.dtype == torch.float64]
        # a tensor that was given, as one written in place or the target of `out=`, keeps its dtype
        made = [tensor for tensor in wide if not any(tensor is operand for operand in operands)]
        if made:
            claimed = asked or self._promoted(operands)
            for tensor in made:
                setattr(tensor, _CLAIM, claimed)

    def _asked_for(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype that a call asks for; None where it follows from the operands."""
        if func in _CASTS:
            return _CASTS[func]
        if func in _LIKE_ANOTHER:
            return self._dtype_of(args[-1])
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return self._dtype_of(args[1])
        asked = [value for value in (*kwargs.values(), *args) if isinstance(value, torch.dtype)]
        return asked[0] if asked else None

    def _promoted(self, operands: Sequence[torch.Tensor]) -> torch.dtype:
        """Return the dtype that torch promotes operands to: tensors without a dimension yield to others."""
        real = [tensor for tensor in operands if tensor.is_floating_point()]
        weighty = [tensor for tensor in real if tensor.dim()] or real
        if not weighty:  # made of nothing, or of whole numbers
            return torch.get_default_dtype()
        promoted = self._dtype_of(weighty[0])
        for tensor in weighty[1:]:
            promoted = torch.promote_types(promoted, self._dtype_of(tensor))
        return promoted


@functools.cache
def _default_epsilon(dtype: torch.dtype) -> float:
    """Return the epsilon of `rms_norm` in a dtype where none is given: its own, or that of float32 in newer torch."""
    own, wide = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    if own <= wide:
        return own
    small = wide**0.5
    with _disable_current_modes(), torch.no_grad():
        normalized = float(torch.rms_norm(torch.full((1,), small, dtype=dtype), (1,)))
    # x over the root of x² + eps: 0.7 with that of float32, below 0.1 with those of half types
    return wide if normalized > 0.5 else own


def claim_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Note on an input in float64 which dtype it has in the tested pass."""
    setattr(tensor, _CLAIM, dtype)


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, and in lists and tuples of any depth."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
