"""The judgement of several calls of a function: the first one, and what the others have instead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from consistency.numerics.rounding_noise import NORM_GRADIENTS
from consistency.testing.call_inputs import are_equal
from consistency.testing.calls import (
    AFTER_BACKWARD,
    AFTER_CALL,
    GRADIENT,
    Computed,
    FunctionCall,
    FunctionRun,
)
from consistency.testing.options import Allow
from consistency.testing.passes import NoisyPasses, noise_of
from consistency.testing.result import ResultError

_HALF = (torch.float16, torch.bfloat16)

_BATCH_NORM_GRADIENTS = (torch.ops.aten.native_batch_norm_backward.default,)
"""Kernels that add up in a half type on the CPU where an incoming gradient is not contiguous, and in float32 else: what
that is off by is no fault of a function that calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsJudge:
    """The calls of a function under test, and how they are judged.

    Attributes
    ----------
    call : FunctionCall
        The function and its reference, with their inputs.
    made : sequence of FunctionRun
        The calls of the function on the device.
    exact : dict
        The results of the reference in float64.
    strides : dict or None
        Strides of the reference's results; None where they are not compared.
    target : torch.device
        The device.
    passes : int
        Number of passes with noise.
    nondeterministic : bool or None
        Whether calls may have other bits; None if they may, and that is told.
    allow : Allow
        What an implementation is allowed beyond rounding.
    """

    call: FunctionCall
    made: Sequence[FunctionRun]
    exact: Computed
    strides: Mapping[str, tuple[int, ...]] | None
    target: torch.device
    passes: int
    nondeterministic: bool | None
    allow: Allow

    @property
    def any_dtype(self) -> bool:
        """Whether a result may have another dtype than the reference's."""
        # autocast has other operations in float32 on a device than on the CPU, where the passes with noise are
        is_cast_elsewhere = self.target.type != "cpu" and torch.is_autocast_enabled(self.target.type)
        return self.allow.dtype or is_cast_elsewhere

    def judge(self) -> tuple[list[ResultError], NoisyPasses]:
        """Judge all calls; return the results, and the passes with noise that they rest on."""
        by_passes = self._passes(sums_in_half=False)
        results = self._judge_by(by_passes)
        # torch's kernels for the CPU alone add up the gradients of a norm in a half type, and few functions call them
        may_add_in_half = self.target.type == "cpu" and self.call.dtype in _HALF
        if may_add_in_half and not _are_within(results):
            called = self.call.operations_on(self.target)
            if called.intersection(NORM_GRADIENTS):
                by_passes = self._passes(sums_in_half=True)
                results = self._judge_by(by_passes)
            if called.intersection(_BATCH_NORM_GRADIENTS) and not _are_within(results):
                contiguous = [made for made in self.made if not made.is_strided]
                return replace(self, made=contiguous)._judge_replaying(by_passes)
        return self._judge_replaying(by_passes, results)

    def _judge_replaying(
        self, passes: NoisyPasses, results: list[ResultError] | None = None
    ) -> tuple[list[ResultError], NoisyPasses]:
        """Judge by some passes, and if they leave a result, by passes that decide as the function does.

        Parameters
        ----------
        results : list of ResultError, optional
            What the passes make of all calls, if known.
        """
        results = self._judge_by(passes) if results is None else results
        if not _are_within(results):
            replaying = passes.replaying(self.target)
            if replaying is not None:
                replayed_results = self._judge_by(replaying)
                # outcomes that are not known of the function excuse it, and accuse it of nothing
                if replaying.has_outcomes_of_function or _are_within(replayed_results):
                    return replayed_results, replaying
        return results, passes

    def _passes(self, *, sums_in_half: bool) -> NoisyPasses:
        noise = noise_of(self.allow, self.target, sums_in_half=sums_in_half)
        return NoisyPasses(self.call, noise, self.passes, self.exact, any_dtype=self.any_dtype)

    def _judge_by(self, passes: NoisyPasses) -> list[ResultError]:
        """Judge all calls by some passes with noise."""
        first = self.made[0]
        results = passes.judge(first.computed)
        if self.strides is not None:
            results = [_with_strides_judged(result, first.strides, self.strides) for result in results]
        results = [*results, *_missing_results(first.computed, self.exact)]
        for number, later in enumerate(self.made[1:], start=2):
            which = f"call {number} of {len(self.made)}"
            results = _with_later_call(
                results, later, first.computed, passes, which, nondeterministic=self.nondeterministic
            )
        return results


def _are_within(results: Sequence[ResultError]) -> bool:
    return all(result.status == "within" for result in results)


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
    later: FunctionRun,
    first: Computed,
    passes: NoisyPasses,
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
        return first.dtype == later.dtype and first.shape == later.shape and are_equal(first, later)
    are_nan = first != first and later != later
    return type(first) is type(later) and bool(are_nan or first == later)
