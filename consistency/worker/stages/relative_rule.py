"""What has no closed form, held against its float64 value, relative to the CPU's own error: forward and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from consistency.numerics.bound import measure_against_exact
from consistency.numerics.diagnosis_computed import diagnose_computed, exact_chunks
from consistency.numerics.digest import TensorDigest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.rules import Rule, passes, ratio, relative_allowance
from consistency.numerics.words import Word
from consistency.worker.stages.context import Context
from consistency.worker.stages.user_tolerance import Given


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a tensor is held against.

    Attributes
    ----------
    exact : torch.Tensor or None
        Float64, on the CPU.
    error : float or None
        The CPU's own largest error in the tested dtype.
    draws : int
        How many independent errors that is the largest of.
    why_not : str or None
        Why there is no exact value.
    """

    exact: torch.Tensor | None
    error: float | None
    samples: int
    why_not: str | None


def judge_relative(
    context: Context,
    *,
    stage: str,
    layer: str,
    tensor: str,
    actual: torch.Tensor,
    digests: Sequence[TensorDigest],
    truth: Truth,
) -> None:
    """Record a tensor by the `relative` rule or the user's tolerance; without an exact value by the other workers."""
    exact, error, samples = truth.exact, truth.error, truth.samples
    given = Given.of(context, stage=stage, layer=layer, dtype=actual.dtype)
    known = exact is not None and exact.shape == actual.shape and actual.dtype in UNIT_ROUNDOFF
    if exact is None or not known or (error is None and given is None):
        context.record.computed(
            stage=stage, layer=layer, tensor=tensor, actual=actual, rule=Rule.PEER, found=None, status="measured",
            diagnosis=None, digests=digests, keep=context.job.case.keep, reason=truth.why_not,
        )  # fmt: skip
        return
    if given is not None:
        found = measure_against_exact(actual, exact, given.allowance)
        status = given.status(found)
        tolerance = given.allowance
        # inside a tolerance that nobody derived there is nothing to say of its cause
        why = diagnose_computed(found, lambda: exact_chunks(actual, exact, tolerance)) if status == "outside" else None
        context.record.computed(
            stage=stage, layer=layer, tensor=tensor, actual=actual, rule=Rule.USER, found=found, status=status,
            diagnosis=None if why is None else why.word, digests=digests, reference_error=error,
            evidence={**given.evidence, **({} if why is None else why.evidence)}, keep=context.job.case.keep,
            exact=exact,
        )  # fmt: skip
        return
    assert error is not None
    found = measure_against_exact(actual, exact)
    allowed = relative_allowance(error, float(found.magnitude), name_of(actual.dtype), samples=samples)
    inside = passes(ratio(float(found.max_abs), allowed))
    cause = None if inside else diagnose_computed(found, lambda: exact_chunks(actual, exact, allowed))
    context.record.computed(
        stage=stage,
        layer=layer,
        tensor=tensor,
        actual=actual,
        rule=Rule.RELATIVE,
        found=found,
        status="within" if inside else "outside",
        diagnosis=Word.ACCUMULATION_ORDER if cause is None else cause.word,
        evidence=None if cause is None else {**cause.evidence, "allowed": allowed},
        digests=digests,
        reference_error=error,
        reference_samples=samples,
        keep=context.job.case.keep,
        exact=exact,
    )
