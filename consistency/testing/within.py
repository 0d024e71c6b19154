"""The three public functions."""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from consistency.errors import UsageError
from consistency.numerics.decision import Decision, gaps
from consistency.numerics.decisions import TO_INTEGER
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.testing.calls import GRADIENT, Computed, FunctionCall, Noise
from consistency.testing.options import Allow, check_options
from consistency.testing.result import (
    ResultError,
    Status,
    allowance,
    as_tensor,
    check_dtype,
    judged,
    parts_of,
)
from consistency.worker.cpu_error import by_formula, with_noise
from consistency.worker.precision import products_of

PASSES = 8
"""With noise: those of gradients in the tool, and enough for a tensor of one row."""

_MOST = 4
"""Times as many are computed at most, where few elements leave a result inconclusive: of one row the limit is 19 times
the largest figure of 8 passes, 4.2 times that of 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinRounding:
    """The errors of a function's results and gradients.

    Attributes
    ----------
    name : str
        Of the function, with dtype, device and passes.
    results : tuple of ResultError
    """

    name: str
    results: tuple[ResultError, ...]

    @property
    def status(self) -> Status:
        """The worst status of the results."""
        found = {one.status for one in self.results}
        return "outside" if "outside" in found else "inconclusive" if "inconclusive" in found else "within"

    def __bool__(self) -> bool:
        return self.status == "within"

    def __str__(self) -> str:
        told = [one for one in self.results if one.status != "within"] or list(self.results)
        head = {
            "outside": "beyond what rounding may do",
            "inconclusive": "inconclusive: rounding may be as large as a fault would be",
            "within": "within what rounding may do",
        }[self.status]
        return "\n".join([f"{self.name}: {head}", *map(str, told)])


class RoundingTolerance(dict[str, Any]):  # floats, and of any type to what takes ``**tolerance``
    """`rtol` and `atol` of a function's result, to be given to an assertion as ``**tolerance``.

    Attributes
    ----------
    allowed : dict of str to torch.Tensor
        What each element may be off by from the exact value, float64, by the name of the result.
    """

    def __init__(self, *, rtol: float, atol: float, allowed: dict[str, torch.Tensor]) -> None:
        super().__init__(rtol=rtol, atol=atol)
        self.allowed = allowed


def _noise(allow: Allow, device: torch.device) -> Noise:
    """Return the context in which a pass is computed as such a device may, by its seed."""
    products = products_of(device) if allow.products is None else allow.products
    return lambda seed: with_noise(products, seed, toward_zero=allow.toward_zero, is_kept=seed < PASSES)


def _missing(name: str, *, is_of_actual: bool) -> str:
    if is_of_actual:
        return "the reference has no such result"
    hint = ": gradients=False compares values alone" if name.startswith(GRADIENT) else ""
    return f"the function has none, and its reference has one{hint}"


def _may_differ(
    decision: Decision, operands: list[torch.Tensor], got: torch.Tensor, truth: torch.Tensor
) -> torch.Tensor:
    """Return where a decision that made a result may go another way, as its margin is what rounding may do."""
    nothing = torch.zeros_like(truth, dtype=torch.bool)
    chosen, operand = decision.decided, decision.operand.to(torch.float64)
    if chosen.numel() != truth.numel() or operands[0].dtype not in UNIT_ROUNDOFF:
        return nothing
    if not torch.equal(chosen.reshape(truth.shape).to(truth.dtype), truth):
        return nothing
    if not all(bool(one.isfinite().all()) for one in (operand, *operands)):
        return nothing
    allowed = allowance(operands, operand).allowed(operand, operands[0].dtype)
    if decision.dim is None:
        is_close = decision.margins(operand) <= decision.scores * allowed
        if decision.name == TO_INTEGER:
            # what an earlier rounding made whole is at the edge of a cast, and yet the cast decides nothing
            is_close &= ~torch.stack([one == one.round() for one in (operand, *operands)]).all(0)
        return is_close.reshape(truth.shape)
    other = got.reshape(chosen.shape).long().clamp(0, operand.shape[decision.dim] - 1)
    together = allowed.gather(decision.dim, chosen) + allowed.gather(decision.dim, other)
    is_close = gaps(operand, decision.dim, chosen, other) <= together
    return (is_close & (other == got.reshape(chosen.shape))).reshape(truth.shape)


def within_rounding(
    function: Callable[..., Any],
    *inputs: Any,
    reference: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = True,
    passes: int = PASSES,
    allow: Allow | None = None,
) -> WithinRounding:
    """Judge a function; the parameters are those of `assert_within_rounding`, and a mismatch is returned."""
    check_options(
        function, reference=reference, device=device, dtype=dtype, gradients=gradients, passes=passes, allow=allow
    )
    call = FunctionCall(function, reference, inputs, dtype=dtype, gradients=gradients)
    place = call.device if device is None else torch.device(device)
    allow = allow or Allow()
    noise = _noise(allow, place)
    # autocast has other operations in float32 on a device than on the CPU, where the passes with noise are
    any_dtype = allow.dtype or (place.type != "cpu" and torch.is_autocast_enabled(place.type))
    actual, exact = call.on(place), call.exact()
    name = getattr(function, "__name__", type(function).__name__)
    for result, value in exact.items():
        if not (call.has_nan or allow.nan) and isinstance(value, torch.Tensor) and bool(value.isnan().any()):
            raise UsageError(
                f"{name}: the reference is NaN in its {result}",
                where="the float64 pass",
                hint="choose inputs for which it is defined, or allow=Allow(nan=True)",
            )

    def undecided(got: torch.Tensor, truth: torch.Tensor, others: Any) -> torch.Tensor:
        found = torch.stack([other != truth for other in others]).any(0)
        for decision, operands in call.decisions(passes, noise):
            found |= _may_differ(decision, operands, got, truth)
        return found

    drawn: list[Computed] = []
    results: dict[str, ResultError] = {}
    while not drawn or (len(drawn) < _MOST * passes and any(one.status == "inconclusive" for one in results.values())):
        with by_formula():
            drawn += call.with_noise(range(len(drawn), len(drawn) + max(passes, len(drawn))), noise)
        for result, value in exact.items():
            if result in actual and (result not in results or results[result].status == "inconclusive"):
                passed = [one[result] for one in drawn]
                results[result] = judged(result, actual[result], value, passed, undecided, any_dtype=any_dtype)
    missing = [
        ResultError(name=one, status="outside", ratio=math.inf, reason=_missing(one, is_of_actual=one in actual))
        for one in {**actual, **exact}
        if (one in actual) != (one in exact)
    ]
    title = f"{name} ({name_of(call.dtype)}, {place}, {len(drawn)} passes with noise)"
    return WithinRounding(name=title, results=(*results.values(), *missing))


def assert_within_rounding(
    function: Callable[..., Any],
    *inputs: Any,
    reference: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    gradients: bool = True,
    passes: int = PASSES,
    allow: Allow | None = None,
) -> None:
    """Raise an error unless what a function computes is off by no more than rounding may make it.

    The function is called once on the device, from inputs that are rounded once, and, or its reference, in float64 and
    with random rounding errors on the CPU, from the same. Random generators are seeded alike for each call, inputs are
    copied for it, and what is left in them counts as a result.

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
        Where the function is called; where the first tensor is by default.
    dtype : torch.dtype, optional
        float32, float16 or bfloat16: floating-point inputs are rounded to it.
    gradients : bool, optional
        Compare the first gradients of the inputs that require them, or of all floating-point ones where none does.
    passes : int, optional
        With noise, two at least. More make the limits of a few elements narrower; up to four times as many are computed
        before a result is inconclusive.
    allow : Allow, optional
        What else a healthy implementation may do, and what an inconclusive test does.

    Raises
    ------
    AssertionError
        With the worst element of each result that is outside, or inconclusive.
    unittest.SkipTest
        Where it is inconclusive and `allow` says so.
    consistency.ConsistencyError
        There is nothing to compare with: the reference cannot be computed, or is NaN; or an option has a value that
        it cannot have.

    Notes
    -----
    The rule is that of `consistency.numerics.error_spread`.
    """
    __tracebackhide__ = True
    found = within_rounding(
        function,
        *inputs,
        reference=reference,
        device=device,
        dtype=dtype,
        gradients=gradients,
        passes=passes,
        allow=allow,
    )
    choice = (allow or Allow()).inconclusive
    if found.status == "inconclusive" and choice == "skip":
        raise unittest.SkipTest(str(found))
    if found.status == "outside" or (found.status == "inconclusive" and choice == "fail"):
        raise AssertionError(str(found))


def rounding_tolerance(
    function: Callable[..., Any],
    *inputs: Any,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    passes: int = PASSES,
    allow: Allow | None = None,
) -> RoundingTolerance:
    r"""Return the tolerances with which two healthy results of a function are equal.

    The function, of torch's operations, is computed in float64 and with noise on the CPU. An element may be off by
    :math:`l \sqrt{r c + u^2 x^2 / 3} \le l \sqrt{r c} + (l u / \sqrt 3) |x|`, which are `atol` and `rtol`; of the two
    that an assertion compares each may be, so they are twice that.

    Parameters
    ----------
    function, *inputs, dtype, passes, allow
        As those of `assert_within_rounding`.
    device : torch.device or str, optional
        Whose settings tell how products may be computed.

    Returns
    -------
    RoundingTolerance
        `rtol` and `atol` for all results of the function, and what each element may be off by. A complex number may be
        off by what its parts may be off by together; a Python number is taken for one of float32. Whole numbers and
        truth values beside these have no tolerance.

    Raises
    ------
    consistency.ConsistencyError
        No result has floating-point numbers, or one has a dtype whose rounding is not known; or an option has a value
        that it cannot have.
    """
    check_options(function, device=device, dtype=dtype, passes=passes, allow=allow)
    call = FunctionCall(function, None, inputs, dtype=dtype, gradients=False)
    noise = _noise(allow or Allow(), call.device if device is None else torch.device(device))
    with by_formula():
        drawn = call.with_noise(range(passes), noise)
    relative = 0.0
    allowed: dict[str, torch.Tensor] = {}
    sizes: dict[str, torch.Tensor] = {}
    has_numbers = False
    for name, exact in call.exact().items():
        passed = [computed[name] for computed in drawn]
        if isinstance(exact, float | complex):
            exact, passed = as_tensor(exact, wide=True), [as_tensor(number) for number in passed]
        if not isinstance(exact, torch.Tensor) or not (exact.is_floating_point() or exact.is_complex()):
            continue
        has_numbers = True
        if not exact.numel():
            continue
        is_complex = exact.is_complex()
        if is_complex:
            exact, passed = parts_of(exact), [parts_of(values) for values in passed]
        check_dtype(name, passed[0].dtype)
        places = torch.stack([exact, *passed]).isfinite().all(0)
        truth, *finite = (values.masked_fill(~places, 0) for values in (exact, *passed))
        spread = allowance(finite, truth)
        allowed[name], sizes[name] = spread.allowed(truth, finite[0].dtype), truth.abs()
        if is_complex:
            # a distance in the plane: where each part is off by at most a + r |part|, both are by |a, a'| + r |number|
            allowed[name] = torch.linalg.vector_norm(allowed[name], dim=0)
            sizes[name] = torch.linalg.vector_norm(sizes[name], dim=0)
        relative = max(relative, 2 * float(spread.limits.element) * UNIT_ROUNDOFF[finite[0].dtype] / math.sqrt(3))
    if not has_numbers:
        raise UsageError(
            "no result has floating-point numbers: others have no tolerance",
            where="rounding_tolerance",
            hint="compare for equality, or by assert_within_rounding, which knows where a choice is open",
        )
    absolute = max((float((2 * allowed[name] - relative * size).max()) for name, size in sizes.items()), default=0.0)
    return RoundingTolerance(rtol=relative, atol=absolute, allowed=allowed)
