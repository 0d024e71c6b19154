"""The three public functions: judge a function, assert that it is within rounding, and return its tolerances."""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from consistency.errors import UsageError
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.testing.calls import Computed, FunctionCall
from consistency.testing.judged_calls import CallsJudge
from consistency.testing.options import Allow, check_calls, check_options
from consistency.testing.passes import PASSES, noise_of
from consistency.testing.result import (
    ResultError,
    Status,
    allowance,
    as_tensor,
    check_dtype,
    parts_of,
)
from consistency.worker.cpu_error import by_formula

_MOST_OF_REPR = 200
"""Characters of a result in one line: pytest cuts what is longer than 240 in its middle."""

CALLS = 3
"""Calls of the function under test: one, another to be the same, and one whose incoming gradients are not
contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WithinRounding:
    """The errors of a function's results and gradients.

    Attributes
    ----------
    name : str
        Name of the function, with dtype, device and number of passes.
    results : tuple of ResultError
        The error of each result, and of each gradient.
    """

    name: str
    results: tuple[ResultError, ...]

    @property
    def status(self) -> Status:
        """Return the worst status of the results."""
        statuses = {result.status for result in self.results}
        if "outside" in statuses:
            return "outside"
        return "inconclusive" if "inconclusive" in statuses else "within"

    def __bool__(self) -> bool:
        return self.status == "within"

    def __repr__(self) -> str:
        """Return one line that pytest does not cut when it shows `assert within_rounding(...)`."""
        wrong = [result for result in self.results if result.status != "within"]
        if not wrong:
            return f"<within rounding: {self.name}>"
        first = f"{wrong[0].name}: {wrong[0].status}, {wrong[0].explanation or wrong[0].reason}"
        further = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"<{first[:_MOST_OF_REPR]}{further}>"

    def __str__(self) -> str:
        shown = [result for result in self.results if result.status != "within"] or list(self.results)
        head = {
            "outside": "beyond what rounding may do",
            "inconclusive": "inconclusive: rounding may be as large as a fault would be",
            "within": "within what rounding may do",
        }[self.status]
        return "\n".join([f"{self.name}: {head}", *map(str, shown)])


class RoundingTolerance(dict[str, Any]):  # floats, and of any type to what takes ``**tolerance``
    """`rtol` and `atol` of a function's result, to be given to an assertion as ``**tolerance``.

    Attributes
    ----------
    allowed : dict of str to torch.Tensor
        Largest error of each element against the exact value, float64, by the name of the result.
    """

    def __init__(self, *, rtol: float, atol: float, allowed: dict[str, torch.Tensor]) -> None:
        super().__init__(rtol=rtol, atol=atol)
        self.allowed = allowed


def _check_no_nan(name: str, exact: Computed) -> None:
    """Raise an error if the reference of a function is NaN somewhere: there is nothing to compare with."""
    for result, value in exact.items():
        if isinstance(value, torch.Tensor) and bool(value.isnan().any()):
            raise UsageError(
                f"{name}: the reference is NaN in its {result}",
                where="the float64 pass",
                hint="choose inputs for which it is defined, or allow=Allow(nan=True)",
            )


def within_rounding(
    function: Callable[..., Any],
    *inputs: Any,
    reference: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = True,
    passes: int = PASSES,
    calls: int = CALLS,
    strides: bool = False,
    consumes: Collection[int | str] = (),
    nondeterministic: bool | None = None,
    allow: Allow | None = None,
) -> WithinRounding:
    """Judge a function as `assert_within_rounding` does, with its parameters; return a mismatch, never raise it."""
    check_options(
        function, reference=reference, device=device, dtype=dtype, gradients=gradients, passes=passes, allow=allow
    )
    check_calls(calls=calls, strides=strides, consumes=consumes, nondeterministic=nondeterministic)
    allow = allow or Allow()
    call = FunctionCall(function, reference, inputs, dtype=dtype, gradients=gradients, consumes=consumes)
    target = call.device if device is None else torch.device(device)
    made = call.on(target, calls=calls, strided=not allow.contiguous)
    exact, expected_strides = call.exact(), call.strides
    name = getattr(function, "__name__", type(function).__name__)
    if not call.has_nan and not allow.nan:
        _check_no_nan(name, exact)

    judge = CallsJudge(
        call=call,
        made=made,
        exact=exact,
        strides=expected_strides if strides else None,
        target=target,
        passes=passes,
        nondeterministic=nondeterministic,
        allow=allow,
    )
    results, noisy_passes = judge.judge()
    title = f"{name} ({name_of(call.dtype)}, {target}, {noisy_passes.count} passes with noise)"
    return WithinRounding(name=title, results=tuple(results))


def assert_within_rounding(
    function: Callable[..., Any],
    *inputs: Any,
    reference: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = True,
    passes: int = PASSES,
    calls: int = CALLS,
    strides: bool = False,
    consumes: Collection[int | str] = (),
    nondeterministic: bool | None = None,
    allow: Allow | None = None,
) -> None:
    """Raise an error unless the results of a function are within what rounding may do.

    The function is called on the device, several times. Then it, or its reference, is called on the CPU: once in
    float64, and several times with random rounding errors. All calls have the same inputs, which are rounded once. For
    each call random generators are seeded alike and inputs are copied; what a call or its backward pass writes into
    its inputs counts as a result.

    Parameters
    ----------
    function : callable
        Takes the inputs and returns tensors, in lists, tuples and dictionaries of any depth. A module is a function of
        its parameters too.
    *inputs
        Tensors, such containers of them, or anything else.
    reference : callable, optional
        The same function in torch's operations, where `function` is a kernel of its own or asks for its dtype.
    device : torch.device or str, optional
        Device that the function is called on; by default the device of the first tensor.
    dtype : torch.dtype, optional
        float32, float16 or bfloat16, to which floating-point inputs are rounded.
    gradients : bool, optional
        Compare the first gradients of the inputs that require them, or of all floating-point ones where none does.
    passes : int, optional
        Number of passes with random rounding errors, two at least. More passes make the limits of a few elements
        narrower; up to four times as many are computed before a result is called inconclusive.
    calls : int, optional
        Number of calls on the device, with equal inputs; each has to be within rounding. The last of several has
        incoming gradients that are not contiguous.
    strides : bool, optional
        Compare the strides of the results with those of the reference's, too.
    consumes : collection of int or str, optional
        Inputs that the function may leave changed, after the call or its backward pass, by number or by name: `0`,
        ``"input 1['b']"``; ``"incoming gradient"`` stands for the gradients that its results are given.
    nondeterministic : bool, optional
        Whether calls with equal inputs may have other bits, as atomic additions make them, each within rounding all the
        same. False makes such a result outside; by default the judgement names it, and passes.
    allow : Allow, optional
        Further allowances for a healthy implementation, and the outcome of an inconclusive test.

    Raises
    ------
    AssertionError
        A result is outside, or inconclusive; the message has the worst element of each such result.
    unittest.SkipTest
        A result is inconclusive, and `allow` asks for a skip.
    consistency.ConsistencyError
        There is nothing to compare with: the reference cannot be computed, or is NaN; or an option has a value that
        it cannot have.

    Notes
    -----
    The rule is derived in `consistency.numerics.error_spread`.
    """
    __tracebackhide__ = True
    within = within_rounding(
        function,
        *inputs,
        reference=reference,
        device=device,
        dtype=dtype,
        gradients=gradients,
        passes=passes,
        calls=calls,
        strides=strides,
        consumes=consumes,
        nondeterministic=nondeterministic,
        allow=allow,
    )
    choice = (allow or Allow()).inconclusive
    if within.status == "inconclusive" and choice == "skip":
        raise unittest.SkipTest(str(within))
    if within.status == "outside" or (within.status == "inconclusive" and choice == "fail"):
        raise AssertionError(str(within))


def rounding_tolerance(
    function: Callable[..., Any],
    *inputs: Any,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    passes: int = PASSES,
    allow: Allow | None = None,
) -> RoundingTolerance:
    r"""Return the tolerances within which two healthy results of a function agree.

    The function must consist of torch's operations; it is computed in float64 and with noise on the CPU. An element may
    be off by
    :math:`l \sqrt{r c + u^2 x^2 / 3} \le l \sqrt{r c} + (l u / \sqrt 3) |x|`, which gives `atol` and
    `rtol`. An assertion compares two results, each of which may be off by so much: both tolerances are twice that.

    Parameters
    ----------
    function, *inputs, dtype, passes, allow
        The same as of `assert_within_rounding`.
    device : torch.device or str, optional
        Device whose settings tell in which precision products may be computed.

    Returns
    -------
    RoundingTolerance
        `rtol` and `atol` for all results of the function, and the largest error of each element. A complex number may
        be off by the errors of both its parts together; a Python number counts as float32. Whole numbers and truth
        values have no tolerance.

    Raises
    ------
    consistency.ConsistencyError
        No result has floating-point numbers, or one has a dtype whose rounding is not known; or an option has a value
        that it cannot have.
    """
    check_options(function, device=device, dtype=dtype, passes=passes, allow=allow)
    call = FunctionCall(function, None, inputs, dtype=dtype, gradients=False)
    target = call.device if device is None else torch.device(device)
    noise = noise_of(allow or Allow(), target, sums_in_half=target.type == "cpu")
    with by_formula():
        drawn = call.with_noise(range(passes), noise)
    tolerances: dict[str, _ResultTolerance] = {}
    has_numbers = False
    for name, exact in call.exact().items():
        noisy = [computed[name] for computed in drawn]
        if isinstance(exact, float | complex):
            exact, noisy = as_tensor(exact, wide=True), [as_tensor(number) for number in noisy]
        if not isinstance(exact, torch.Tensor) or not (exact.is_floating_point() or exact.is_complex()):
            continue
        has_numbers = True
        if exact.numel():
            tolerances[name] = _tolerance_of_result(name, exact, noisy)
    if not has_numbers:
        raise UsageError(
            "no result has floating-point numbers: others have no tolerance",
            where="rounding_tolerance",
            hint="compare for equality, or by assert_within_rounding, which knows where a choice is open",
        )
    relative = max((tolerance.relative for tolerance in tolerances.values()), default=0.0)
    absolute = max((tolerance.absolute_beside(relative) for tolerance in tolerances.values()), default=0.0)
    allowed = {name: tolerance.allowed for name, tolerance in tolerances.items()}
    return RoundingTolerance(rtol=relative, atol=absolute, allowed=allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResultTolerance:
    """The tolerance of one result."""

    allowed: torch.Tensor
    """The error that each element may have, float64."""
    sizes: torch.Tensor
    """Magnitude of each exact element, float64."""
    relative: float
    """Least relative tolerance of two results that are compared with each other."""

    def absolute_beside(self, relative: float) -> float:
        """Return the least absolute tolerance of two results, beside a relative one."""
        return float((2 * self.allowed - relative * self.sizes).max())


def _tolerance_of_result(name: str, exact: torch.Tensor, noisy: list[torch.Tensor]) -> _ResultTolerance:
    """Return the tolerance of a result of floating-point or complex numbers, by passes with noise."""
    is_complex = exact.is_complex()
    if is_complex:
        exact, noisy = parts_of(exact), [parts_of(values) for values in noisy]
    check_dtype(name, noisy[0].dtype)
    # an element that is not finite somewhere has no error to measure: it is zero in all
    is_finite = torch.stack([exact, *noisy]).isfinite().all(0)
    truth, *finite = (values.masked_fill(~is_finite, 0) for values in (exact, *noisy))
    spread = allowance(finite, truth)
    allowed, sizes = spread.allowed(truth, finite[0].dtype), truth.abs()
    if is_complex:
        # the length of both parts' errors: with a + r |x| and b + r |y| for these, at most |(a, b)| + r |x + iy|
        allowed = torch.linalg.vector_norm(allowed, dim=0)
        sizes = torch.linalg.vector_norm(sizes, dim=0)
    relative = 2 * float(spread.limits.element) * UNIT_ROUNDOFF[finite[0].dtype] / math.sqrt(3)
    return _ResultTolerance(allowed=allowed, sizes=sizes, relative=relative)
