"""The modes in which a function is called: what is filled, noted, widened or forced meanwhile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from consistency.errors import UsageError, first_line
from consistency.numerics.decision import Decision
from consistency.numerics.decisions import DecisionMode
from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.exact import Float64Mode
from consistency.numerics.widening import each_tensor
from consistency.testing.call_inputs import TESTED


class FilledMemory(TorchFunctionMode):
    """Fill floating-point memory that nothing was written to with NaN."""

    _EMPTY = frozenset(
        {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_unwritten = func in self._EMPTY and (result.is_floating_point() or result.is_complex())
        return result.detach().fill_(torch.nan).requires_grad_(result.requires_grad) if is_unwritten else result


def filling() -> FilledMemory | None:
    """Return a mode that fills memory with NaN; None in a process with torch's compiler, which would compile anew."""
    return None if "torch._dynamo" in sys.modules else FilledMemory()


class NotingOperations(DispatchMode):
    """Add each operation that is called to a set."""

    def __init__(self, called: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._called = called

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._called.add(func)
        return func(*args, **(kwargs or {}))


@functools.cache
def _draws(func: Any) -> bool:
    """Report whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


class WithTestedDraws(Float64Mode):
    """Compute in float64, but draw random numbers in the tested dtype: in float64 they would be others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _draws(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = dict(kwargs or {})
        with _disable_current_modes():
            narrow: list[tuple[torch.Tensor, torch.Tensor]] = []

            def narrowed(value: torch.Tensor) -> torch.Tensor:
                if value.dtype != torch.float64:
                    return value
                narrow.append((value, value.to(self._dtype)))
                return narrow[-1][1]

            result = func(*each_tensor(narrowed, args), **each_tensor(narrowed, kwargs))
            if func._schema.is_mutable:
                for value, drawn in narrow:
                    value.copy_(drawn)
            wide_by_narrow = {id(drawn): value for value, drawn in narrow}

            def widened(drawn: torch.Tensor) -> torch.Tensor:
                if id(drawn) in wide_by_narrow:  # the operand itself, as of an operation in place
                    return wide_by_narrow[id(drawn)]
                return drawn.double() if drawn.dtype in TESTED else drawn

            return each_tensor(widened, result)


def noting(decisions: list[Decision], *, gradient: bool) -> DecisionMode:
    """Return a mode that appends every decision, with copies of its tensors on the CPU, to a list."""

    def watch(decision: Decision) -> None:
        copies = {name: getattr(decision, name).to("cpu", copy=True) for name in ("operand", "decided")}
        decisions.append(replace(decision, **copies))

    return DecisionMode(watch, gradient=gradient)


def forcing(decisions: Sequence[Decision]) -> AbstractContextManager[Any]:
    """Return a mode in which the first decisions have these outcomes."""
    if not decisions:
        return nullcontext()
    wanted = iter(decisions)

    def watch(decision: Decision) -> torch.Tensor | None:
        forced = next(wanted, None)
        is_alike = forced is not None and forced.name == decision.name
        if forced is None or not is_alike or forced.decided.shape != decision.decided.shape:
            return None
        return None if torch.equal(forced.decided, decision.decided) else forced.decided

    return DecisionMode(watch, gradient=True)


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled functions as they were written, and leave no weights that autocast rounded in its cache."""
    torch.clear_autocast_cache()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
    torch.clear_autocast_cache()


@contextmanager
def needed(how: str) -> Iterator[None]:
    """Raise any error of the reference as a user's: without the reference there is nothing to compare with."""
    try:
        yield
    except Exception as error:  # of any function
        raise UsageError(
            f"the reference cannot be computed {how}",
            got=first_line(error),
            hint="reference= takes a function of torch's operations, with the same inputs on the CPU",
        ) from error
