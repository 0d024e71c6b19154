"""Call a function on equal inputs: on its device, in float64, and with random rounding errors."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from consistency.errors import UsageError, first_line
from consistency.numerics.decision import Decision
from consistency.numerics.decisions import DecisionMode
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.exact import Float64Mode
from consistency.numerics.widening import each_tensor
from consistency.worker import determinism

Computed = dict[str, Any]
"""What a call returned, left in its inputs, and made of gradients, by name; tensors are on the CPU, without a graph."""

Noise = Callable[[int], AbstractContextManager[None]]
"""The context of a pass with noise, by its seed."""

GRADIENT = "gradient of "

_COPIED = 1
"""Writes that a copy was made by."""

_LARGE = 1 << 14
"""Elements of an input that are not compared after each pass: that takes as long as the pass."""

_OFFSETS = 256
"""Elements. Of the offset of an input, a copy keeps what is beyond a multiple of it, by which its memory is aligned,
and one such multiple: so a part of a large tensor is copied without the memory before it."""

TESTED = frozenset(UNIT_ROUNDOFF) - {torch.float64}
"""What inputs may be rounded to."""


class FunctionCall:
    """A function and its inputs, rounded once.

    Parameters
    ----------
    function : callable
        A module's parameters and buffers are inputs too, so that its reference may be computed elsewhere.
    reference : callable or None
        What is computed in float64 and with noise instead; a module has parameters of the same names.
    inputs : sequence
        Tensors, in lists, tuples and dictionaries of any depth, and anything else.
    dtype : torch.dtype or None
        What floating-point inputs are rounded to.
    gradients : bool
        Of the inputs that require them; of all floating-point ones where none does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        reference: Callable[..., Any] | None,
        inputs: Sequence[Any],
        *,
        dtype: torch.dtype | None = None,
        gradients: bool = True,
    ) -> None:
        state: dict[str, torch.Tensor] = {}
        if isinstance(function, torch.nn.Module):
            state = {**dict(function.named_parameters()), **dict(function.named_buffers())}
            if reference is not None and not isinstance(reference, torch.nn.Module):
                raise UsageError(
                    "a module needs a module as its reference",
                    got=type(reference).__name__,
                    hint="or give functions that take the parameters among their inputs",
                )
            if isinstance(reference, torch.nn.Module):
                _check_parameters(function, reference)
        self._function, self._reference = function, function if reference is None else reference
        placed, self._spec = tree_flatten_with_path((tuple(inputs), state))
        self._names = [_named(_part(path), path[1:]) for path, _ in placed]
        self._leaves = [_rounded(leaf, dtype) for _, leaf in placed]
        self._gradients = gradients
        self._drawn: dict[tuple[int, Sequence[int]], torch.Tensor] = {}
        self._writes = False
        asked = any(_has_gradient(leaf) for _, leaf in placed)
        self._with_gradient = [_has_gradient(leaf) if asked or _part(path) else gradients for path, leaf in placed]
        real = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        tested = [leaf.dtype for leaf in real if leaf.dtype in TESTED]
        if real and not tested:
            raise UsageError(
                "no input has a dtype whose rounding is known",
                got=real[0].dtype,
                wanted=", ".join(sorted(map(str, TESTED))),
                hint="dtype= rounds the inputs",
            )
        self.dtype: torch.dtype = max(tested, key=UNIT_ROUNDOFF.__getitem__, default=torch.float32)
        """The one whose rounding is the largest."""
        self.device: torch.device = next(
            (leaf.device for leaf in self._leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu")
        )
        self.has_nan: bool = any(bool(leaf.isnan().any()) for leaf in real if leaf.layout is torch.strided)

    def on(self, device: torch.device) -> Computed:
        """Compute what is judged."""
        return self._computed(self._function, device, by_torch=False)

    def exact(self) -> Computed:
        """Compute the reference in float64 on the CPU."""
        with _eagerly(), Float64Mode(), _SameDraws(self.dtype), _needed("in float64"):
            return self._computed(self._reference, torch.device("cpu"), wide=True)

    def with_noise(self, seeds: range, noise: Noise) -> list[Computed]:
        """Compute the reference with random rounding errors on the CPU."""
        return [self._noisy(noise(seed)) for seed in seeds]

    def _noisy(self, *modes: AbstractContextManager[Any]) -> Computed:
        kind = self.device.type
        with _eagerly(), ExitStack() as stack:
            if kind != "cpu" and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype(kind)))
            for mode in (*modes, _needed("on the CPU")):
                stack.enter_context(mode)
            return self._computed(self._reference, torch.device("cpu"))

    def decisions(self, passes: int, noise: Noise) -> list[tuple[Decision, list[torch.Tensor]]]:
        """Compute once more what decides, such as a comparison or an order: each with its operand in every pass."""
        exact: list[Decision] = []
        with _eagerly(), Float64Mode(), _SameDraws(self.dtype), _noting(exact):
            self._computed(self._reference, torch.device("cpu"), wide=True)
        drawn: list[list[Decision]] = []
        for seed in range(passes):
            drawn.append([])
            self._noisy(noise(seed), _noting(drawn[-1]))
        return [
            (one, [other.operand for other in others])
            for one, *others in zip(exact, *drawn, strict=False)
            if all(other.operand.shape == one.operand.shape for other in others)
        ]

    def _computed(
        self, function: Callable[..., Any], device: torch.device, *, wide: bool = False, by_torch: bool = True
    ) -> Computed:
        with _disable_current_modes():
            leaves = [
                self._prepared(leaf, device, wide, has_gradient and self._gradients)
                for leaf, has_gradient in zip(self._leaves, self._with_gradient, strict=True)
            ]
            given = [_copied(leaf) for leaf in leaves]
        with torch.set_grad_enabled(self._gradients or torch.is_grad_enabled()), determinism.seeded():
            if self._writes:
                given = [_copied(leaf, keeps_graph=True) for leaf in leaves]
            try:
                result = self._called(function, given)
            except RuntimeError as error:
                # a leaf cannot be written to; what is not one warns under torch.compile, so it is no more than needed
                if self._writes or "leaf" not in str(error):
                    raise
                self._writes = True
                return self._computed(function, device, wide=wide, by_torch=by_torch)
            found = {f"result{keystr(path)}": one for path, one in tree_flatten_with_path(result)[0]}
            for name, before, after in zip(self._names, leaves, given, strict=True):
                if not any(after is one for one in found.values()) and not _same(before, after, by_torch=by_torch):
                    found[f"{name} after the call"] = after
            sources = leaves if self._writes else given
            return {**each_tensor(_finished, found), **(self._backward(found, sources) if self._gradients else {})}

    def _called(self, function: Callable[..., Any], given: Sequence[Any]) -> Any:
        inputs, state = tree_unflatten(given, self._spec)
        if isinstance(function, torch.nn.Module):
            return torch.func.functional_call(function, state, inputs)
        return function(*inputs)

    def _prepared(self, leaf: Any, device: torch.device, wide: bool, has_gradient: bool) -> Any:
        if isinstance(leaf, torch.Generator):
            return leaf.clone_state()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        differentiable = leaf.dtype in TESTED or leaf.is_complex()
        dtype = leaf.dtype
        if wide and differentiable:
            dtype = torch.complex128 if leaf.is_complex() else torch.float64
        leaf = leaf.detach()
        if wide:
            leaf = leaf.to(device, dtype)  # torch's own operations follow any strides
        elif leaf.device != device:
            leaf = _laid_out(leaf, device=device)
        return leaf.requires_grad_(has_gradient and differentiable)

    def _backward(self, found: Mapping[str, Any], leaves: Sequence[Any]) -> Computed:
        """Go back from all results at once, from gradients that are the same in every pass."""
        names = [name for name, leaf in zip(self._names, leaves, strict=True) if _has_gradient(leaf)]
        wanted = [leaf for leaf in leaves if _has_gradient(leaf)]
        ends = [one for one in found.values() if _has_gradient(one)]
        if not ends or not wanted:
            return {}
        incoming = [self._incoming_gradient(result, number) for number, result in enumerate(ends)]
        gradients = torch.autograd.grad(ends, wanted, incoming, allow_unused=True)
        zeros = (torch.zeros_like(leaf) if one is None else one for leaf, one in zip(wanted, gradients, strict=True))
        return {f"{GRADIENT}{name}": _finished(one) for name, one in zip(names, zeros, strict=True)}

    def _incoming_gradient(self, result: torch.Tensor, number: int) -> torch.Tensor:
        """Return normal deviates of few bits, which every dtype has: drawn once, as that takes as long as a pass.

        They have seeds of their own. From those that tests take by habit they would be the numbers that the test's
        inputs were drawn as, and with a gradient that is x itself the gradient of a weight, x.T @ x, is its transpose.
        """
        shape = (*result.shape, 2) if result.is_complex() else result.shape
        with _disable_current_modes():
            if (number, shape) not in self._drawn:
                generator = torch.Generator().manual_seed(zlib.crc32(f"incoming gradient {number}".encode()))
                deviates = torch.randn(shape, generator=generator)
                self._drawn[number, shape] = deviates.to(torch.bfloat16).to(torch.float16).to(torch.float64)
            deviates = self._drawn[number, shape]
            if result.is_complex():
                deviates = torch.view_as_complex(deviates)
            return deviates.to(result.device, result.dtype)


class _SameDraws(TorchDispatchMode):
    """Draw random numbers in the tested dtype inside `Float64Mode`: in float64 they would be others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        with _disable_current_modes():
            narrow: list[tuple[torch.Tensor, torch.Tensor]] = []

            def narrowed(value: torch.Tensor) -> torch.Tensor:
                if value.dtype != torch.float64:
                    return value
                narrow.append((value, value.to(self._dtype)))
                return narrow[-1][1]

            found = func(*each_tensor(narrowed, args), **each_tensor(narrowed, kwargs))
            if func._schema.is_mutable:
                for value, drawn in narrow:
                    value.copy_(drawn)
            written = {id(drawn): value for value, drawn in narrow}
            return each_tensor(lambda one: written.get(id(one), one.double() if one.dtype in TESTED else one), found)


def _check_parameters(module: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Raise an error unless every parameter of one is one of the other: the reference computes with the module's."""
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


def _noting(found: list[Decision]) -> DecisionMode:
    def watch(decision: Decision) -> None:
        copies = {name: getattr(decision, name).clone() for name in ("operand", "decided")}
        found.append(replace(decision, **copies))

    return DecisionMode(watch, gradient=False)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Run what `torch.compile` made as it was written, and keep nothing that autocast rounds."""
    torch.clear_autocast_cache()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
    torch.clear_autocast_cache()


@contextmanager
def _needed(how: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any function
        raise UsageError(
            f"the reference cannot be computed {how}",
            got=first_line(error),
            hint="reference= takes a function of torch's operations, with the same inputs on the CPU",
        ) from error


def _part(path: Sequence[Any]) -> int:
    """Return 0 for an input, 1 for a tensor of the module."""
    return int(path[0].idx)


def _named(part: int, path: Sequence[Any]) -> str:
    return f"input {path[0].idx}{keystr(tuple(path[1:]))}" if part == 0 else str(path[0].key)


def _rounded(leaf: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(leaf, torch.Tensor) or dtype is None or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    if leaf.is_complex():
        dtype = torch.complex64
    return leaf if leaf.dtype == dtype else _laid_out(leaf.detach(), dtype=dtype)


def _copied(value: Any, *, keeps_graph: bool = False) -> Any:
    """Copy a tensor with its place in memory; a new leaf unless it `keeps_graph`."""
    if not isinstance(value, torch.Tensor):
        return value
    if keeps_graph:
        return _laid_out(value)
    return _laid_out(value.detach()).requires_grad_(value.requires_grad)


def _laid_out(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Copy a tensor with its strides and its offset in memory, which a kernel may depend on.

    A tensor with several elements in one place, as `expand` makes, is copied as torch does it.
    """
    dtype, device = dtype or tensor.dtype, device or tensor.device
    shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if tensor.layout is not torch.strided or 0 in strides:
        return tensor.to(device, dtype, copy=True)
    if not offset or not tensor.numel():
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(tensor)
    if offset >= _OFFSETS:
        offset = _OFFSETS + offset % _OFFSETS
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.empty(last + 1, dtype=dtype, device=device).untyped_storage()
    # not a view of the memory, which autograd would follow when the function writes to it
    return torch.empty(0, dtype=dtype, device=device).set_(memory, offset, shape, strides).copy_(tensor)


def _same(before: Any, after: Any, *, by_torch: bool) -> bool:
    """Report whether a call left an input as it was; NaN is not itself.

    Torch counts what it writes, but not the statistics of a batch, which are small. Kernels count nothing.
    """
    if not isinstance(after, torch.Tensor) or after.layout is not torch.strided:
        return True
    if by_torch and after.numel() >= _LARGE and after._version <= _COPIED:
        return True
    with _disable_current_modes(), torch.no_grad():
        return torch.equal(before, after) or bool(((before == after) | ((before != before) & (after != after))).all())


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _finished(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).cpu().clone()
