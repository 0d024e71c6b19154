"""The inputs of a function that is called several times: their names, copies of them, and what a call has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr

from consistency.errors import UsageError
from consistency.numerics.dtype import UNIT_ROUNDOFF

INCOMING = "incoming gradient"
"""Beginning of the name of a gradient that a result is given in the backward pass."""

WRITES_OF_A_COPY = 1
"""Version of a tensor that was written to once, to copy another one into it."""

_LARGE = 1 << 14
"""Elements from which an input is not compared after each pass: that takes as long as the pass."""

_OFFSETS = 256
"""Elements. A copy keeps the remainder of an input's offset over this, which decides how its memory is aligned, and one
multiple of it: so a part of a large tensor is copied without the memory before it."""

TESTED = frozenset(UNIT_ROUNDOFF) - {torch.float64}
"""Dtypes that inputs may be rounded to."""


def _is_of_module(path: Sequence[Any]) -> bool:
    """Report whether a path into `(inputs, state)` leads to a tensor of the module."""
    return bool(path[0].idx == 1)


def leaf_name(path: Sequence[Any]) -> str:
    """Return the name of a leaf by its path: `input 0['x']`, or the name of a module's parameter or buffer."""
    if _is_of_module(path):
        return str(path[1].key)
    return f"input {path[1].idx}{keystr(tuple(path[2:]))}"


def consumed_names(consumes: Collection[int | str], names: Sequence[str]) -> frozenset[str]:
    """Return the names of the inputs that a function may change: a number or `input 0` stands for all tensors in it."""
    consumed: set[str] = set()
    for given in consumes:
        prefix = f"input {given}" if isinstance(given, int) else given
        chosen = {name for name in names if name == prefix or name.startswith(f"{prefix}[")}
        if prefix == INCOMING:
            chosen = {INCOMING}
        if not chosen:
            raise UsageError(
                "no input has this name", where="consumes=", got=repr(given), wanted=", ".join([*names, INCOMING])
            )
        consumed |= chosen
    return frozenset(consumed)


def choose_gradients(paths_and_leaves: Sequence[tuple[Sequence[Any], Any]], *, default: bool) -> list[bool]:
    """Return for each leaf whether its gradient is computed: where no leaf requires one, `default` holds for inputs."""
    any_requires_gradient = any(requires_gradient(leaf) for _, leaf in paths_and_leaves)
    chosen = []
    for path, leaf in paths_and_leaves:
        # a module says itself which of its parameters have gradients
        is_stated = any_requires_gradient or _is_of_module(path)
        chosen.append(requires_gradient(leaf) if is_stated else default)
    return chosen


def requires_gradient(value: Any) -> bool:
    """Report whether a value is a tensor whose gradient is computed."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def check_reference(module: torch.nn.Module, reference: Callable[..., Any] | None) -> None:
    """Raise an error unless a module's reference is a module too, with parameters of the same names; None is fine."""
    if reference is None:
        return
    if not isinstance(reference, torch.nn.Module):
        raise UsageError(
            "a module needs a module as its reference",
            got=type(reference).__name__,
            hint="or give functions that take the parameters among their inputs",
        )
    _check_parameters(module, reference)


def _check_parameters(module: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Raise an error unless both have parameters of the same names: the reference computes with the module's."""
    names = {name for name, _ in module.named_parameters()}
    of_reference = {name for name, _ in reference.named_parameters()}
    if names == of_reference:
        return
    raise UsageError(
        "the reference has parameters of other names than the module",
        where="reference=",
        got=", ".join(sorted(of_reference - names)) or "no others",
        wanted=", ".join(sorted(names - of_reference)) or "no others",
        hint="or give functions that take the parameters among their inputs",
    )


def round_leaf(leaf: Any, dtype: torch.dtype | None) -> Any:
    """Return a floating-point tensor rounded to a dtype, a complex one to complex64; anything else as it is."""
    if dtype is None or not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_complex():
        dtype = torch.complex64
    elif not leaf.is_floating_point():
        return leaf
    return leaf if leaf.dtype == dtype else laid_out(leaf.detach(), dtype=dtype)


def repeated(leaf: Any, count: int) -> Any:
    """Return copies of a tensor along one more dimension in front, a new leaf of autograd; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copies = leaf.detach().expand(count, *leaf.shape).clone()
    return copies.requires_grad_(leaf.requires_grad)


def copied(value: Any, *, keeps_graph: bool = False) -> Any:
    """Copy a tensor with its layout in memory; a new leaf of autograd unless the copy `keeps_graph`."""
    if not isinstance(value, torch.Tensor):
        return value
    if keeps_graph:
        return laid_out(value)
    return laid_out(value.detach()).requires_grad_(value.requires_grad)


def laid_out(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Copy a tensor with its strides and its offset in memory, which a kernel may depend on.

    A tensor with several elements in one place, as `expand` makes, is copied as torch does it.
    """
    dtype, device = dtype or tensor.dtype, device or tensor.device
    if tensor.layout is not torch.strided or 0 in tensor.stride():
        return tensor.to(device, dtype, copy=True)
    shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if not offset or not tensor.numel():
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(tensor)
    if offset >= _OFFSETS:
        offset = _OFFSETS + offset % _OFFSETS
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.empty(last + 1, dtype=dtype, device=device).untyped_storage()
    # not a view of the memory, which autograd would follow when the function writes to it
    return torch.empty(0, dtype=dtype, device=device).set_(memory, offset, shape, strides).copy_(tensor)


def with_other_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose dimensions lie in memory in reversed order, each element followed by a NaN.

    A kernel that reads it as if it were contiguous stays within its memory, and gets other elements and NaN.
    """
    if not tensor.dim():
        return tensor
    memory = tensor.new_full((*reversed(tensor.shape), 2), torch.nan)
    other = memory.select(-1, 0).permute(*reversed(range(tensor.dim())))
    return other.copy_(tensor)


def is_unchanged(before: Any, after: Any, *, by_torch: bool) -> bool:
    """Report whether a call left an input as it was, where NaN counts as the same as NaN.

    Torch counts what it writes, but not the statistics of a batch, which are small. Kernels count nothing.
    """
    if not isinstance(after, torch.Tensor) or after.layout is not torch.strided:
        return True
    if by_torch and after.numel() >= _LARGE and after._version <= WRITES_OF_A_COPY:
        return True
    with _disable_current_modes(), torch.no_grad():
        return are_equal(before, after)


def are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Report whether two tensors of one shape are equal, where NaN is equal to NaN."""
    if first.dtype == torch.complex32:  # which torch does not compare
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    # most are equal, and to find NaN takes longer
    return torch.equal(first, second) or bool(((first == second) | ((first != first) & (second != second))).all())


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a result: on the CPU, dense, without a graph."""
    tensor = tensor.detach()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.cpu().clone()


def strides_of(results: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the strides of each dense tensor, 0 for a dimension of one element, where they mean nothing."""
    strides = {}
    for name, value in results.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            pairs = zip(value.shape, value.stride(), strict=True)
            strides[name] = tuple(stride if size > 1 else 0 for size, stride in pairs)
    return strides
