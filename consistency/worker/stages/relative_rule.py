"""The `relative` rule of `forward` and `gradient`: errors against float64, relative to the CPU's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.rules import Rule, Verdict, judge_relative
from consistency.worker.model.float64_reference import Reference, publish
from consistency.worker.protocol import REFERENCE_FILE
from consistency.worker.stages.context import Context


def publish_errors(
    context: Context,
    on_cpu: Mapping[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    *,
    samples: Callable[[torch.Tensor, torch.Tensor], int],
    failures: dict[str, str],
    exact_name: Callable[[str], str] = str,
    file: str = REFERENCE_FILE,
) -> Reference:
    """Share exact tensors and the CPU's own errors with all workers; `samples` counts the independent errors."""
    pairs = {name: (tensor, exact.get(exact_name(name))) for name, tensor in on_cpu.items()}
    known = {name: (own, truth) for name, (own, truth) in pairs.items() if truth is not None}
    known = {name: (own, truth) for name, (own, truth) in known.items() if own.shape == truth.shape}
    return publish(
        context.scratch,
        exact,
        errors={name: float(measure_against_exact(*pair).max_abs) for name, pair in known.items()},
        samples={name: samples(*pair) for name, pair in known.items()},
        failures=failures,
        file=file,
    )


def record_relative(
    context: Context,
    stage: str,
    layer: str,
    tensor: str,
    *,
    actual: torch.Tensor,
    digests: Sequence[TensorDigest],
    reference: Reference,
    name: str,
    exact_name: str,
    mode: str,
) -> None:
    """Record a tensor by the `relative` rule or the user's tolerance; without an exact value by the other workers.

    `reference` has the CPU's own error by `name`, the exact tensor by `exact_name`, and by `mode` why there is none.
    """
    exact, error = reference.read(exact_name), reference.errors.get(name)
    tolerance = context.record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    known = exact is not None and exact.shape == actual.shape and actual.dtype in UNIT_ROUNDOFF
    if exact is None or not known or (error is None and tolerance is None):
        context.record.computed(
            stage, layer, tensor, actual=actual, digests=digests, chunks=tuple, reason=reference.failures.get(mode)
        )
        return
    found, samples = measure_against_exact(actual, exact, tolerance), reference.samples.get(name, 1)
    verdict: Verdict | None = None
    if tolerance is None:
        assert error is not None
        verdict = judge_relative(found, name_of(actual.dtype), reference_error=error, samples=samples)
    limit: float | UserAllowance | None = tolerance if verdict is None else verdict.allowed
    context.record.computed(
        stage,
        layer,
        tensor,
        actual=actual,
        digests=digests,
        found=found,
        rule=Rule.RELATIVE,
        tolerance=tolerance,
        bound_ratio=None if verdict is None else verdict.ratio,
        chunks=lambda: exact_chunks(actual, exact, limit),
        outside=lambda: {} if verdict is None else {"allowed": verdict.allowed},
        reference_error=error,
        reference_samples=None if verdict is None else samples,
        exact=exact,
    )
