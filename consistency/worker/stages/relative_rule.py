"""The `relative` rule of `forward` and `gradient`: errors against float64, relative to the CPU's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.rules import Rule, Verdict, judge_relative
from consistency.worker.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The reference of a tensor.

    Attributes
    ----------
    exact : torch.Tensor or None
        Float64, on the CPU.
    error : float or None
        The CPU's own largest error in the tested dtype.
    samples : int
        How many independent errors that is the largest of.
    why_not : str or None
        Why there is no exact value.
    """

    exact: torch.Tensor | None
    error: float | None
    samples: int
    why_not: str | None


def record_relative(
    record: Recorder,
    *,
    stage: str,
    layer: str,
    tensor: str,
    actual: torch.Tensor,
    digests: Sequence[TensorDigest],
    truth: Truth,
) -> None:
    """Record a tensor by the `relative` rule or the user's tolerance; without an exact value by the other workers."""
    exact, error = truth.exact, truth.error
    tolerance = record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    known = exact is not None and exact.shape == actual.shape and actual.dtype in UNIT_ROUNDOFF
    if exact is None or not known or (error is None and tolerance is None):
        record.judged(
            stage=stage, layer=layer, tensor=tensor, actual=actual, digests=digests, found=None, rule=Rule.PEER,
            chunks=tuple, reason=truth.why_not,
        )  # fmt: skip
        return
    verdict: Verdict | None = None
    limit: float | UserAllowance
    if tolerance is not None:
        limit = tolerance.allowance
        found = measure_against_exact(actual, exact, limit)
    else:
        assert error is not None
        found = measure_against_exact(actual, exact)
        verdict = judge_relative(
            float(found.max_abs), found.mismatched, float(found.magnitude), name_of(actual.dtype),
            reference_error=error, samples=truth.samples,
        )  # fmt: skip
        limit = verdict.allowed
    record.judged(
        stage=stage,
        layer=layer,
        tensor=tensor,
        actual=actual,
        digests=digests,
        found=found,
        rule=Rule.RELATIVE,
        tolerance=tolerance,
        bound_ratio=None if verdict is None else verdict.ratio,
        chunks=lambda: exact_chunks(actual, exact, limit),
        outside=lambda: {} if verdict is None else {"allowed": verdict.allowed},
        reference_error=error,
        reference_samples=None if verdict is None else truth.samples,
        exact=exact,
    )
