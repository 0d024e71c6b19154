"""Call a function several times with equal inputs: on its device, in float64, and with random rounding errors."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from consistency.errors import UsageError, first_line
from consistency.numerics.decision import Decision
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.exact import Float64Mode
from consistency.numerics.rounding_operations import NotTogetherError
from consistency.numerics.widening import each_tensor
from consistency.testing.asked_dtype import AskedDtype, claim_dtype
from consistency.testing.call_inputs import (
    INCOMING,
    TESTED,
    WRITES_OF_A_COPY,
    check_reference,
    choose_gradients,
    consumed_names,
    copied,
    finished,
    is_unchanged,
    laid_out,
    leaf_name,
    repeated,
    requires_gradient,
    round_leaf,
    strides_of,
    with_other_strides,
)
from consistency.testing.call_modes import NotingOperations, WithTestedDraws, eagerly, filling, forcing, needed, noting
from consistency.worker import determinism

Computed = dict[str, Any]
"""The results of a call, the inputs that it changed, and the gradients, by name; tensors are on the CPU, without a
graph."""


class Noise(Protocol):
    """Return the context of a pass with noise, by its seed; or of several passes that are computed together."""

    def __call__(self, seed: int, *, together: bool = False) -> AbstractContextManager[None]: ...


GRADIENT = "gradient of "
"""Beginning of the name of a gradient."""

AFTER_CALL, AFTER_BACKWARD = " after the call", " after the backward pass"
"""Ends of the names of what a call has changed."""

_MANY_OPERATIONS = 300
"""Operations of a reference, with its backward pass, from which on passes are computed together: a recurrence."""

_SMALL = 1 << 16
"""Most elements of each input then: of larger ones an operation takes longer than Python takes to see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRun:
    """One of several calls of the function under test with equal inputs."""

    computed: Computed
    """Empty if it failed."""
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Strides of each tensor that the function returned."""
    error: str = ""
    """First line of the error that it raised, where an earlier call raised none."""
    is_strided: bool = False
    """Whether its incoming gradients were not contiguous."""


class _WrittenLeafError(RuntimeError):
    """A function writes to an input that is a leaf of autograd, which torch refuses."""


class FunctionCall:
    """A function and its inputs, rounded once.

    Parameters
    ----------
    function : callable
        A module's parameters and buffers are inputs too, so that its reference may be computed elsewhere.
    reference : callable or None
        The function that is computed in float64 and with noise instead; a module has parameters of the same names.
    inputs : sequence
        Tensors, in lists, tuples and dictionaries of any depth, and anything else.
    dtype : torch.dtype or None
        Dtype that floating-point inputs are rounded to; None leaves them as they are.
    gradients : bool
        Whether to compute gradients: of the inputs that require them, or of all floating-point ones where none does.
    consumes : collection of int or str
        Inputs that the function may leave changed, by number or name; `incoming gradient` for those of its results.

    Raises
    ------
    UsageError
        A module has a reference that is none, or has other parameters; no input has a dtype whose rounding is known; or
        none has a name of `consumes`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        reference: Callable[..., Any] | None,
        inputs: Sequence[Any],
        *,
        dtype: torch.dtype | None = None,
        gradients: bool = True,
        consumes: Collection[int | str] = (),
    ) -> None:
        state: dict[str, torch.Tensor] = {}
        if isinstance(function, torch.nn.Module):
            state = {**dict(function.named_parameters()), **dict(function.named_buffers())}
            check_reference(function, reference)
        self._function = function
        self._reference = function if reference is None else reference
        paths_and_leaves, self._spec = tree_flatten_with_path((tuple(inputs), state))
        self._names = [leaf_name(path) for path, _ in paths_and_leaves]
        self._leaves = [round_leaf(leaf, dtype) for _, leaf in paths_and_leaves]
        self._consumed = consumed_names(consumes, self._names)
        self._gradients = gradients
        self._incoming_gradients: dict[tuple[int, Sequence[int]], torch.Tensor] = {}
        self._strides: dict[str, tuple[int, ...]] = {}  # of the results of the latest call
        self._operations = 0  # of the latest pass in float64
        self._writes = False  # whether the function writes to its inputs, which the first call shows
        self._with_gradient = choose_gradients(paths_and_leaves, default=gradients)
        real = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        # float64 inputs alone show no rounding: float64 is the reference
        tested = [leaf.dtype for leaf in real if leaf.dtype in TESTED]
        if real and not tested:
            raise UsageError(
                "no input has a dtype whose rounding is known",
                got=real[0].dtype,
                wanted=", ".join(sorted(map(str, TESTED))),
                hint="dtype= rounds the inputs",
            )
        self.dtype: torch.dtype = max(tested, key=UNIT_ROUNDOFF.__getitem__, default=torch.float32)
        """The dtype of an input whose rounding is the largest."""
        self.device: torch.device = next(
            (leaf.device for leaf in self._leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu")
        )
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        self._is_small = all(leaf.layout is torch.strided and leaf.numel() <= _SMALL for leaf in tensors)
        self.has_nan: bool = any(bool(leaf.isnan().any()) for leaf in real if leaf.layout is torch.strided)

    def on(self, device: torch.device, *, calls: int = 1, strided: bool = False) -> list[FunctionRun]:
        """Compute the function that is judged, on a device, several times with equal inputs.

        In the second, memory that `torch.empty` returns is filled with NaN: what a kernel leaves unwritten often has
        the values of the call before, or zeros.

        Parameters
        ----------
        strided : bool
            Give the last of several calls the same incoming gradients with other strides.
        """
        first = self._computed(self._function, device, by_torch=False)
        made = [FunctionRun(computed=first, strides=self._strides)]
        has_gradients = any(name.startswith(GRADIENT) for name in first)
        for number in range(1, calls):
            is_strided = strided and has_gradients and number == calls - 1
            try:
                computed = self._computed(
                    self._function, device, by_torch=False, is_strided=is_strided, fills=number == 1
                )
            except Exception as error:  # of any function: the first call raised none
                made.append(FunctionRun(computed={}, error=first_line(error), is_strided=is_strided))
            else:
                made.append(FunctionRun(computed=computed, strides=self._strides, is_strided=is_strided))
        return made

    def operations_on(self, device: torch.device) -> set[Any]:
        """Return the operations of torch's that the function calls on a device, by one call more."""
        called: set[Any] = set()
        with NotingOperations(called):
            self._computed(self._function, device, by_torch=False)
        return called

    @property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """Return the strides of each tensor that the latest call returned."""
        return self._strides

    def exact(self, replayed: Sequence[Decision] = ()) -> Computed:
        """Compute the reference in float64 on the CPU, with these outcomes of its first decisions."""
        with self._in_float64() as mode, forcing(replayed), needed("in float64"):
            computed = self._computed(self._reference, torch.device("cpu"), wide=True)
        # of attention every other pass is that of a fused kernel, so such passes are computed one by one
        self._operations = 0 if mode.has_kernels else mode.operations
        return computed

    @contextmanager
    def _in_float64(self) -> Iterator[Float64Mode]:
        """Compute in float64, with the draws of the tested dtype."""
        with eagerly(), WithTestedDraws(self.dtype) as mode:
            yield mode

    def with_noise(self, seeds: range, noise: Noise, replayed: Sequence[Decision] = ()) -> list[Computed]:
        """Compute the reference with random rounding errors on the CPU, with these outcomes of its first decisions."""
        if not replayed and self._operations >= _MANY_OPERATIONS and self._is_small:
            together = self._passes_together(len(seeds), noise(seeds.start, together=True))
            if together is not None:
                return together
        return [self._noisy(noise(seed), forcing(replayed)) for seed in seeds]

    def _passes_together(self, count: int, mode: AbstractContextManager[None]) -> list[Computed] | None:
        """Compute several passes at once, as one more dimension of all tensors; None where that cannot be done.

        Of a reference in many small operations, such as a recurrence, a pass takes as long as Python takes to see each
        operation. All passes have other noise, and other elements of one tensor have, too.
        """
        outcome: list[Computed] = []

        def compute(function: Callable[..., Any], device: torch.device) -> None:
            outcome.extend(self._computed_together(function, device, count))

        try:
            self._noisy(mode, compute=compute)
        except (UsageError, RuntimeError):
            # what vmap has no rule for, a value that Python asks for, or an operation with another noise
            return None
        return outcome

    def _computed_together(self, function: Callable[..., Any], device: torch.device, count: int) -> list[Computed]:
        """Call a function with one more dimension in front of all tensors, and return what each element of it has."""
        with _disable_current_modes():
            leaves = [
                self._prepared(leaf, device, False, has_gradient and self._gradients)
                for leaf, has_gradient in zip(self._leaves, self._with_gradient, strict=True)
            ]
            arguments = [repeated(leaf, count) for leaf in leaves]
        dimensions = [0 if isinstance(argument, torch.Tensor) else None for argument in arguments]
        results: dict[str, Any] = {}
        others: dict[str, Any] = {}

        def called(*arguments: Any) -> list[torch.Tensor]:
            for path, value in tree_flatten_with_path(self._called(function, arguments))[0]:
                name = f"result{keystr(path)}"
                (results if isinstance(value, torch.Tensor) else others)[name] = value
            return [*results.values()]

        with torch.set_grad_enabled(self._gradients or torch.is_grad_enabled()), determinism.seeded():
            tensors = torch.func.vmap(called, in_dims=tuple(dimensions))(*arguments)
            results = dict(zip(results, tensors, strict=True))
            if any(isinstance(leaf, torch.Tensor) and leaf._version > WRITES_OF_A_COPY for leaf in arguments):
                raise NotTogetherError("an input that is written to")
            computed: Computed = each_tensor(finished, results)
            if self._gradients:
                computed |= self._gradients_together(results, arguments, count)
        parts = [{name: tensor[number] for name, tensor in computed.items()} for number in range(count)]
        return [{**part, **others} for part in parts]

    def _gradients_together(self, results: Mapping[str, Any], arguments: Sequence[Any], count: int) -> Computed:
        """Return the gradients of all arguments, with the same output gradients for each pass."""
        named = {name: leaf for name, leaf in zip(self._names, arguments, strict=True) if requires_gradient(leaf)}
        outputs = [value for value in results.values() if requires_gradient(value)]
        if not outputs or not named:
            return {}
        incoming = [
            self._incoming_gradient(output[0].detach(), number).expand(count, *output.shape[1:]).clone()
            for number, output in enumerate(outputs)
        ]
        gradients = torch.autograd.Variable._execution_engine.run_backward(
            tuple(outputs), tuple(incoming), False, False, tuple(named.values()), True, False
        )
        computed: Computed = {}
        for (name, leaf), gradient in zip(named.items(), gradients, strict=True):
            computed[f"{GRADIENT}{name}"] = finished(torch.zeros_like(leaf) if gradient is None else gradient)
        return computed

    def _noisy(self, *modes: AbstractContextManager[Any], compute: Callable[..., Any] | None = None) -> Computed:
        """Compute the reference on the CPU inside some modes, and in the autocast that is on for the device.

        Parameters
        ----------
        compute : callable, optional
            Computes a function on a device instead of `_computed`.
        """
        kind = self.device.type
        with eagerly(), ExitStack() as stack:
            # the CPU has an autocast of its own, which the device's does not switch on
            if kind != "cpu" and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype(kind)))
            for mode in (*modes, needed("on the CPU")):
                stack.enter_context(mode)
            return (compute or self._computed)(self._reference, torch.device("cpu"))

    def decisions(
        self, passes: int, noise: Noise, *, gradient: bool = False
    ) -> list[tuple[Decision, list[torch.Tensor]]]:
        """Compute the reference once more for its decisions, such as a comparison or an order.

        Each is returned with its operand in every pass; decisions whose operands have other shapes there are left out.

        Parameters
        ----------
        gradient : bool
            Note also the decisions that a gradient alone depends on.
        """
        exact: list[Decision] = []
        with self._in_float64(), noting(exact, gradient=gradient):
            self._computed(self._reference, torch.device("cpu"), wide=True)
        drawn: list[list[Decision]] = []
        for seed in range(passes if exact else 0):
            drawn.append([])
            self._noisy(noise(seed), noting(drawn[-1], gradient=gradient))
        decisions = []
        for decision, *noisy_decisions in zip(exact, *drawn, strict=False):
            operands = [noisy.operand for noisy in noisy_decisions]
            if all(operand.shape == decision.operand.shape for operand in operands):
                decisions.append((decision, operands))
        return decisions

    def decisions_on(self, device: torch.device) -> list[Decision]:
        """Compute the function that is judged once more, for the decisions of torch's operations in it."""
        decisions: list[Decision] = []
        with noting(decisions, gradient=True):
            self._computed(self._function, device, by_torch=False)
        return decisions

    def _computed(
        self,
        function: Callable[..., Any],
        device: torch.device,
        *,
        wide: bool = False,
        by_torch: bool = True,
        is_strided: bool = False,
        fills: bool = False,
    ) -> Computed:
        """Call a function, and return its results, what it changed, and the gradients.

        Parameters
        ----------
        wide : bool
            Whether the inputs are converted to float64.
        by_torch : bool
            Whether torch computes it all, and so counts most of the writes to an input: kernels do not.
        is_strided : bool
            Whether its incoming gradients are not contiguous.
        fills : bool
            Whether memory that nothing was written to is filled with NaN.
        """
        compute = functools.partial(
            self._results, function, device, wide=wide, by_torch=by_torch, is_strided=is_strided, fills=fills
        )
        try:
            return compute()
        except _WrittenLeafError:
            # from now on arguments are copies that keep the graph, which can be written to; they warn under
            # torch.compile, so they are no more than needed
            self._writes = True
            return compute()

    def _results(
        self,
        function: Callable[..., Any],
        device: torch.device,
        *,
        wide: bool,
        by_torch: bool,
        is_strided: bool,
        fills: bool,
    ) -> Computed:
        """Do what `_computed` does, once."""
        mode = filling() if fills else None
        with _disable_current_modes():
            leaves = [
                self._prepared(leaf, device, wide, has_gradient and self._gradients)
                for leaf, has_gradient in zip(self._leaves, self._with_gradient, strict=True)
            ]
            arguments = [copied(leaf) for leaf in leaves]
        with torch.set_grad_enabled(self._gradients or torch.is_grad_enabled()), determinism.seeded():
            if self._writes:
                arguments = [copied(leaf, keeps_graph=True) for leaf in leaves]
            with self._answering(arguments) if wide else mode or nullcontext():
                result = self._called(function, arguments)
            results = {f"result{keystr(path)}": value for path, value in tree_flatten_with_path(result)[0]}
            self._strides = strides_of(results)
            unchanged = self._add_changed_inputs(results, leaves, arguments, by_torch=by_torch)
            computed: Computed = each_tensor(finished, results)
            if self._gradients:
                versions = {name: argument._version for name, (_, argument) in unchanged.items()}
                # copies that keep the graph are no leaves: their gradients are those of what they were copied from
                sources = leaves if self._writes else arguments
                computed |= self._backward(results, sources, mode, is_strided=is_strided, by_torch=by_torch)
                computed |= _changed_since(unchanged, versions, by_torch=by_torch)
            return computed

    def _add_changed_inputs(
        self, results: dict[str, Any], leaves: Sequence[Any], arguments: Sequence[Any], *, by_torch: bool
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Add the arguments that a call has changed to its results, unless it returned them.

        Those that it left as they were are returned by name, each with its source.
        """
        unchanged: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, before, after in zip(self._names, leaves, arguments, strict=True):
            if name in self._consumed or not isinstance(after, torch.Tensor):
                continue
            if is_unchanged(before, after, by_torch=by_torch):
                unchanged[name] = before, after
            elif not any(after is value for value in results.values()):
                results[name + AFTER_CALL] = after
        return unchanged

    @contextmanager
    def _answering(self, arguments: Sequence[Any]) -> Iterator[None]:
        """Answer a reference in float64 that asks for a dtype as the pass in the tested dtype would."""
        if torch.is_autocast_enabled("cpu"):
            yield  # autocast chooses dtypes by itself, which no call shows
            return
        for leaf, argument in zip(self._leaves, arguments, strict=True):
            if isinstance(argument, torch.Tensor) and argument.dtype == torch.float64:
                claim_dtype(argument, leaf.dtype)
        with AskedDtype(self.dtype):
            yield

    def _called(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Call a function with the flattened arguments; a module also with its parameters and buffers."""
        inputs, state = tree_unflatten(arguments, self._spec)
        try:
            if isinstance(function, torch.nn.Module):
                return torch.func.functional_call(function, state, inputs)
            return function(*inputs)
        except RuntimeError as error:
            if not self._writes and "leaf" in str(error):
                raise _WrittenLeafError(*error.args) from error
            raise

    def _prepared(self, leaf: Any, device: torch.device, wide: bool, has_gradient: bool) -> Any:
        """Return an input on a device: in float64 if `wide`, and a leaf of autograd if it `has_gradient`."""
        if isinstance(leaf, torch.Generator):
            return leaf.clone_state()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # float64 inputs and integers stay as they are, and have no gradient
        differentiable = leaf.dtype in TESTED or leaf.is_complex()
        dtype = leaf.dtype
        if wide and differentiable:
            dtype = torch.complex128 if leaf.is_complex() else torch.float64
        leaf = leaf.detach()
        if wide:
            leaf = leaf.to(device, dtype)  # torch's own operations follow any strides
        elif leaf.device != device:
            leaf = laid_out(leaf, device=device)
        return leaf.requires_grad_(has_gradient and differentiable)

    def _backward(
        self,
        results: Mapping[str, Any],
        leaves: Sequence[Any],
        mode: TorchFunctionMode | None,
        *,
        is_strided: bool,
        by_torch: bool,
    ) -> Computed:
        """Return the gradients of all leaves, from output gradients that are the same in every pass.

        One backward pass goes from all results at once. A leaf that no result depends on has a gradient of zeros. An
        output gradient that the function writes to is returned too.

        Parameters
        ----------
        mode : TorchFunctionMode, optional
            The mode in which the backward pass runs.
        """
        names = [name for name, leaf in zip(self._names, leaves, strict=True) if requires_gradient(leaf)]
        differentiated = [leaf for leaf in leaves if requires_gradient(leaf)]
        outputs = {name: value for name, value in results.items() if requires_gradient(value)}
        if not outputs or not differentiated:
            return {}
        incoming = [self._incoming_gradient(output, number) for number, output in enumerate(outputs.values())]
        if is_strided:
            incoming = [with_other_strides(gradient) for gradient in incoming]
        versions = [gradient._version for gradient in incoming]
        # torch.autograd.grad imports SymPy to compare shapes, a second of a first assertion, and hides a function mode
        # from the backward passes of the function
        with mode or nullcontext():
            gradients = torch.autograd.Variable._execution_engine.run_backward(
                tuple(outputs.values()), tuple(incoming), False, False, tuple(differentiated), True, False
            )
        computed: Computed = {}
        for name, leaf, gradient in zip(names, differentiated, gradients, strict=True):
            whole = torch.zeros_like(leaf) if gradient is None else gradient  # None where no result depends on the leaf
            computed[f"{GRADIENT}{name}"] = finished(whole)
        for number, (name, output) in enumerate(outputs.items()):
            if by_torch and incoming[number]._version == versions[number]:
                continue
            given = self._incoming_gradient(output, number)
            if INCOMING not in self._consumed and not is_unchanged(given, incoming[number], by_torch=False):
                computed[f"{INCOMING} of {name}{AFTER_BACKWARD}"] = finished(incoming[number])
        return computed

    def _incoming_gradient(self, result: torch.Tensor, number: int) -> torch.Tensor:
        """Return the output gradient of a result: normal deviates of few bits, which every dtype has.

        They are drawn once, as that takes as long as a pass.

        They have seeds of their own. From those that tests take by habit they would be the numbers that the test's
        inputs were drawn as, and with a gradient that is x itself the gradient of a weight, x.T @ x, is its transpose.
        """
        shape = (*result.shape, 2) if result.is_complex() else result.shape
        with _disable_current_modes():
            if (number, shape) not in self._incoming_gradients:
                generator = torch.Generator().manual_seed(zlib.crc32(f"incoming gradient {number}".encode()))
                deviates = torch.randn(shape, generator=generator)
                few_bits = deviates.to(torch.bfloat16).to(torch.float16).to(torch.float64)
                self._incoming_gradients[number, shape] = few_bits
            deviates = self._incoming_gradients[number, shape]
            if result.is_complex():
                deviates = torch.view_as_complex(deviates)
            return deviates.to(result.device, result.dtype, copy=True)


def _changed_since(
    unchanged: Mapping[str, tuple[torch.Tensor, torch.Tensor]], versions: Mapping[str, int], *, by_torch: bool
) -> Computed:
    """Return the inputs that a backward pass has changed, of those that the call had left as they were.

    Parameters
    ----------
    versions : mapping
        The version of each before the backward pass: torch's own counts what it writes.
    """
    computed: Computed = {}
    for name, (before, after) in unchanged.items():
        may_be_changed = after._version != versions[name] or not by_torch
        if may_be_changed and not is_unchanged(before, after, by_torch=False):
            computed[name + AFTER_BACKWARD] = finished(after)
    return computed
