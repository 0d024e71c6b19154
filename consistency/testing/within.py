"""The three public functions: judge a function, assert that it is within rounding, and return its tolerances."""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from consistency.errors import UsageError
from consistency.numerics.decision import Decision, gaps
from consistency.numerics.decisions import TO_INTEGER
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.rounding_noise import NORM_GRADIENTS
from consistency.testing.calls import AFTER_BACKWARD, AFTER_CALL, GRADIENT, Call, Computed, FunctionCall, Noise
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

_HALF = (torch.float16, torch.bfloat16)

PASSES = 8
"""Passes with noise: as many as the tool computes for gradients, and enough for a tensor of one row."""

_MOST_OF_REPR = 200
"""Characters of a result in one line: pytest cuts what is longer than 240 in its middle."""

CALLS = 3
"""Calls of the function under test: one, another to be the same, and one whose incoming gradients are not
contiguous."""

_MOST_TIMES = 4
"""Up to so many times the passes are computed where few elements leave a result inconclusive: of one row the limit is
19 times the largest figure of 8 passes, 4.2 times that of 32."""


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


def _noise(allow: Allow, device: torch.device, *, sums_in_half: bool) -> Noise:
    """Return a function from a seed to the context of a pass with noise, whose errors are those of such a device.

    Parameters
    ----------
    sums_in_half : bool
        Whether the gradients of a norm's parameters may be added up in a half type.
    """
    products = products_of(device) if allow.products is None else allow.products
    # the pools of a usual call's seeds are kept for the next call
    return lambda seed: with_noise(
        products, seed, toward_zero=allow.toward_zero, is_kept=seed < PASSES, sums_in_half=sums_in_half
    )


def _missing_results(actual: Computed, exact: Computed) -> Iterator[ResultError]:
    """Yield an error for each result that only the function has, or only its reference."""
    for name in {**actual, **exact}:
        if name in actual and name in exact:
            continue
        yield ResultError(
            name=name, status="outside", ratio=math.inf, reason=_reason_missing(name, is_of_reference=name in exact)
        )


def _reason_missing(name: str, *, is_of_reference: bool) -> str:
    """Return in words why a result that only the function has, or only its reference, is wrong."""
    is_change = name.endswith((AFTER_CALL, AFTER_BACKWARD))
    if is_change and is_of_reference:
        return "the reference changes it, and the function does not"
    if is_change:
        return "the function changes it, and its reference does not: consumes= says that it may"
    if not is_of_reference:
        return "the reference has no such result"
    hint = ": gradients=False compares values alone" if name.startswith(GRADIENT) else ""
    return f"the function has none, and its reference has one{hint}"


def _check_no_nan(name: str, exact: Computed) -> None:
    """Raise an error if the reference of a function is NaN somewhere: there is nothing to compare with."""
    for result, value in exact.items():
        if isinstance(value, torch.Tensor) and bool(value.isnan().any()):
            raise UsageError(
                f"{name}: the reference is NaN in its {result}",
                where="the float64 pass",
                hint="choose inputs for which it is defined, or allow=Allow(nan=True)",
            )


def _may_differ(
    decision: Decision, operands: list[torch.Tensor], got: torch.Tensor, truth: torch.Tensor
) -> torch.Tensor:
    """Return the elements of a result, of its shape and bool, in which rounding may make a decision go another way.

    These are elements whose margin in the exact pass is no larger than the error that the operand may have. There are
    none if the decision did not make this result.

    Parameters
    ----------
    decision : Decision
        From the exact pass; its operand has the exact values.
    operands : list of torch.Tensor
        Its operand in each pass with noise.
    got, truth : torch.Tensor
        The discrete result of the function, and the exact one.
    """
    nowhere = torch.zeros_like(truth, dtype=torch.bool)
    chosen, operand = decision.decided, decision.operand.to(torch.float64)
    if chosen.numel() != truth.numel() or operands[0].dtype not in UNIT_ROUNDOFF:
        return nowhere
    if not torch.equal(chosen.reshape(truth.shape).to(truth.dtype), truth):
        return nowhere  # the decision is another one, whose outcome is not this result
    if not all(bool(tensor.isfinite().all()) for tensor in (operand, *operands)):
        return nowhere
    allowed = allowance(operands, operand).allowed(operand, operands[0].dtype)
    if decision.dim is None:
        # a margin lies between `scores` values of the operand, each of which may be off by `allowed`
        is_close = decision.margins(operand) <= decision.scores * allowed
        if decision.name == TO_INTEGER:
            # a number that an earlier rounding made whole is at the edge of a cast, and yet the cast decides nothing
            is_close &= ~torch.stack([tensor == tensor.round() for tensor in (operand, *operands)]).all(0)
        return is_close.reshape(truth.shape)
    # a selection: the exact scores of both elements have to be as close as their errors together may be
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
    calls: int = CALLS,
    strides: bool = False,
    consumes: Collection[int | str] = (),
    nondeterministic: bool | None = None,
    allow: Allow | None = None,
) -> WithinRounding:
    """Judge a function as `assert_within_rounding` does, with its parameters; return a mismatch, never raise it."""
    check_options(
        function,
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
    allow = allow or Allow()
    call = FunctionCall(function, reference, inputs, dtype=dtype, gradients=gradients, consumes=consumes)
    target = call.device if device is None else torch.device(device)
    # autocast has other operations in float32 on a device than on the CPU, where the passes with noise are
    any_dtype = allow.dtype or (target.type != "cpu" and torch.is_autocast_enabled(target.type))
    made = call.on(target, calls=calls, strided=not allow.contiguous)
    actual, exact = made[0].computed, call.exact()
    name = getattr(function, "__name__", type(function).__name__)
    if not call.has_nan and not allow.nan:
        _check_no_nan(name, exact)

    passes_with_noise, results = _judge_first_call(call, target, allow, passes, actual, exact, any_dtype=any_dtype)
    if strides:
        results = [_with_strides_judged(result, made[0].strides, call.strides) for result in results]
    results = [*results, *_missing_results(actual, exact)]
    for number, later in enumerate(made[1:], start=2):
        which = f"call {number} of {len(made)}"
        results = _with_later_call(results, later, actual, passes_with_noise, which, nondeterministic=nondeterministic)
    title = f"{name} ({name_of(call.dtype)}, {target}, {passes_with_noise.count} passes with noise)"
    return WithinRounding(name=title, results=tuple(results))


def _judge_first_call(
    call: FunctionCall,
    target: torch.device,
    allow: Allow,
    passes: int,
    actual: Computed,
    exact: Computed,
    *,
    any_dtype: bool,
) -> tuple[_Passes, list[ResultError]]:
    """Judge the results of the first call; return the passes that the verdict rests on, and the results."""

    def judge(*, sums_in_half: bool) -> tuple[_Passes, list[ResultError]]:
        noise = _noise(allow, target, sums_in_half=sums_in_half)
        by_passes = _Passes(call, noise, passes, exact, any_dtype=any_dtype)
        return by_passes, by_passes.judge(actual)

    by_passes, results = judge(sums_in_half=False)
    # torch's kernels for the CPU alone add up the gradients of a norm in a half type, and few functions call them
    may_add_in_half = target.type == "cpu" and call.dtype in _HALF
    if may_add_in_half and not _are_within(results) and call.calls_any(NORM_GRADIENTS, target):
        by_passes, results = judge(sums_in_half=True)
    if _are_within(results):
        return by_passes, results
    replaying = by_passes.replaying(target)
    if replaying is not None:
        replayed_results = replaying.judge(actual)
        # outcomes that are not known of the function excuse it, and accuse it of nothing
        if replaying.has_outcomes_of_function or _are_within(replayed_results):
            return replaying, replayed_results
    return by_passes, results


def _are_within(results: Sequence[ResultError]) -> bool:
    return all(result.status == "within" for result in results)


def _with_strides_judged(
    result: ResultError, actual: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> ResultError:
    """Return a result that is outside if its strides are not the reference's."""
    got, wanted = actual.get(result.name), expected.get(result.name)
    if got == wanted or result.status == "outside":
        return result
    reason = f"its strides are {got}, the reference's {wanted} (0 where a dimension has one element)"
    return replace(result, status="outside", reason=reason, ratio=math.inf)


def _with_later_call(
    results: Sequence[ResultError],
    later: Call,
    first: Computed,
    passes: _Passes,
    which: str,
    *,
    nondeterministic: bool | None,
) -> list[ResultError]:
    """Return the results of the first call, each made worse by what a later call with equal inputs has instead.

    Parameters
    ----------
    which : str
        The number of the later call, in words.
    """
    with_strides = " with incoming gradients that are not contiguous" if later.is_strided else ""
    hint = ": allow=Allow(contiguous=True) says that it needs them so" if later.is_strided else ""
    if later.error:
        failed = ResultError(
            name=which,
            status="outside",
            ratio=math.inf,
            reason=f"it raises an error{with_strides}, and the first call none: {later.error}{hint}",
        )
        return [*results, failed]
    judged_results = []
    for result in results:
        name = result.name
        is_comparable = name in first and name in later.computed and result.status != "outside"
        if not is_comparable or _is_same(first[name], later.computed[name]):
            judged_results.append(result)
            continue
        of_later = passes.judge_one(name, later.computed[name])
        # with other strides a device may choose another kernel
        may_differ = nondeterministic is not False or (later.is_strided and name.startswith(GRADIENT))
        if of_later.status == "outside":
            reason = f"in {which}{with_strides}, and not in the first: {of_later.reason}{hint}"
            judged_results.append(replace(of_later, reason=reason))
        elif may_differ:
            is_told = nondeterministic is None and not later.is_strided and not result.explanation
            note = f"other bits in {which} with equal inputs" if is_told else result.explanation
            judged_results.append(replace(result, explanation=note))
        else:
            reason = f"other bits in {which} with equal inputs, and nondeterministic=False wants the same"
            judged_results.append(replace(of_later, status="outside", reason=reason))
    for name in later.computed:
        if name not in first:
            reason = f"in {which}{with_strides}, and not in the first: {_reason_missing(name, is_of_reference=False)}"
            judged_results.append(ResultError(name=name, status="outside", ratio=math.inf, reason=reason))
    return judged_results


def _is_same(first: Any, later: Any) -> bool:
    """Report whether two results are equal, where NaN is equal to NaN."""
    if isinstance(first, torch.Tensor) and isinstance(later, torch.Tensor):
        if first.dtype != later.dtype or first.shape != later.shape:
            return False
        # most are equal, and to find NaN takes longer
        return torch.equal(first, later) or bool(((first == later) | ((first != first) & (later != later))).all())
    are_nan = first != first and later != later
    return type(first) is type(later) and bool(are_nan or first == later)


def _is_right_choice(own: Decision, exact: Decision, operands: list[torch.Tensor]) -> bool:
    """Report whether a function decides as the exact pass does, but for what rounding may decide either way.

    Parameters
    ----------
    operands : list of torch.Tensor
        The operand of the decision in each pass with noise.
    """
    if own.name != exact.name or own.decided.shape != exact.decided.shape:
        return False
    differs = own.decided != exact.decided
    if not bool(differs.any()):
        return True
    return not bool((differs & ~_may_differ(exact, operands, own.decided, exact.decided)).any())


class _Passes:
    """The passes with noise of a function, and the judgement of results by them.

    Parameters
    ----------
    call : FunctionCall
        The function with its inputs.
    noise : callable
        Returns the context of a pass with noise, by its seed.
    least : int
        Number of passes; there are up to `_MOST_TIMES` as many while a result is inconclusive.
    exact : dict
        The results in float64.
    any_dtype : bool
        Whether a result may have another dtype than the reference's.
    replayed : sequence of Decision
        Decisions whose outcomes the passes have.
    has_outcomes_of_function : bool
        Whether these are the outcomes of the function under test; else they are those of the exact pass.
    """

    def __init__(
        self,
        call: FunctionCall,
        noise: Noise,
        least: int,
        exact: Computed,
        *,
        any_dtype: bool,
        replayed: Sequence[Decision] = (),
        has_outcomes_of_function: bool = False,
    ) -> None:
        self.has_outcomes_of_function = has_outcomes_of_function
        self._replayed = replayed
        self._call = call
        self._noise = noise
        self._least = least
        self._exact = exact
        self._any_dtype = any_dtype
        self._drawn: list[Computed] = []

    @property
    def count(self) -> int:
        """Return the number of passes so far."""
        return len(self._drawn)

    def judge(self, actual: Computed) -> list[ResultError]:
        """Judge the results that the function and its reference both have."""
        results: dict[str, ResultError] = {}
        while not self._drawn or (
            self.count < _MOST_TIMES * self._least and any(map(_is_inconclusive, results.values()))
        ):
            self._draw()
            for name in self._exact:
                is_open = name not in results or _is_inconclusive(results[name])
                if name in actual and is_open:
                    results[name] = self.judge_one(name, actual[name])
        return [*results.values()]

    def replaying(self, target: torch.device) -> _Passes | None:
        """Return passes that decide as the function does where rounding may decide either way; None if nothing decides.

        A router in a half type sends a token to another expert in some passes, and limits become as wide as its values.
        Where it is not known how the function decides, or it decides otherwise than rounding may, the passes decide as
        the exact one.
        """
        with by_formula():
            decisions = self._call.decisions(self._least, self._noise, gradient=True)
        if not decisions:
            return None
        exact_decisions = [decision for decision, _ in decisions]
        own_decisions = self._call.decisions_on(target)
        is_known = len(own_decisions) == len(decisions) and all(
            _is_right_choice(own, decision, operands)
            for own, (decision, operands) in zip(own_decisions, decisions, strict=True)
        )
        replayed = own_decisions if is_known else exact_decisions
        return _Passes(
            self._call,
            self._noise,
            self._least,
            self._call.exact(replayed),
            any_dtype=self._any_dtype,
            replayed=replayed,
            has_outcomes_of_function=is_known,
        )

    def judge_one(self, name: str, actual: Any) -> ResultError:
        """Judge one result by the passes so far."""
        noisy = [computed[name] for computed in self._drawn]
        others = {other: value for other, value in self._exact.items() if other != name and _is_plain(value)}
        return judged(name, actual, self._exact[name], noisy, self._undecided, any_dtype=self._any_dtype, others=others)

    def _draw(self) -> None:
        """Compute the first passes, or as many again as there are."""
        with by_formula():
            seeds = range(self.count, self.count + max(self._least, self.count))
            self._drawn += self._call.with_noise(seeds, self._noise, self._replayed)

    def _undecided(self, got: torch.Tensor, truth: torch.Tensor, noisy: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return where another value of a discrete result is right too."""
        may_differ = torch.stack([tensor != truth for tensor in noisy]).any(0)
        for decision, operands in self._call.decisions(self._least, self._noise):
            may_differ |= _may_differ(decision, operands, got, truth)
        return may_differ


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def _is_inconclusive(result: ResultError) -> bool:
    return result.status == "inconclusive"


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
    noise = _noise(allow or Allow(), target, sums_in_half=target.type == "cpu")
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
