"""The `relative` rule of `forward` and `gradient`: errors against float64, relative to the CPU's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.rules import Rule, Verdict, judge_relative, passes
from consistency.worker import yardstick
from consistency.worker.model.float64_reference import Reference, publish
from consistency.worker.precision import products_of
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
    others: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    file: str = REFERENCE_FILE,
) -> Reference:
    """Share exact tensors and the CPU's own errors with all workers; `samples` counts the independent errors.

    `others` has the CPU's tensors with other products, by the name of these (`consistency.worker.yardstick`): those in
    float32 too, where the CPU's settings permit others.
    """
    others = others or {}

    def known(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        pairs = {name: (tensor, exact.get(exact_name(name))) for name, tensor in tensors.items()}
        return {n: (own, truth) for n, (own, truth) in pairs.items() if truth is not None and own.shape == truth.shape}

    def errors(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return {name: float(measure_against_exact(*pair).max_abs) for name, pair in known(tensors).items()}

    in_float32 = not products_of(torch.device("cpu")).is_reduced
    return publish(
        context.scratch,
        exact,
        errors=errors(on_cpu if in_float32 else others.get(yardstick.PLAIN, {})),
        samples={name: samples(*pair) for name, pair in known(on_cpu).items()},
        failures=failures,
        errors_with={name: errors(tensors) for name, tensors in others.items()},
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
    exact = reference.read(exact_name)
    products = yardstick.name_of(yardstick.products_in(context.model, products_of(context.device)))
    plain, samples = reference.errors.get(name), reference.samples.get(name, 1)
    error = plain if products == yardstick.PLAIN else reference.errors_with.get(products, {}).get(name)
    tolerance = context.record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    known = exact is not None and exact.shape == actual.shape and actual.dtype in UNIT_ROUNDOFF
    judged = error is not None or tolerance is not None or products != yardstick.PLAIN
    if exact is None or not known or not judged:
        context.record.computed(
            stage, layer, tensor, actual=actual, digests=digests, chunks=tuple, reason=reference.failures.get(mode)
        )
        return
    found = measure_against_exact(actual, exact, tolerance)
    verdict: Verdict | None = None
    if tolerance is None:
        dtype = name_of(actual.dtype)
        if error is None and plain is not None:  # what is within the stricter tolerance needs no other
            verdict = judge_relative(found, dtype, reference_error=plain, samples=samples)
            error = plain if passes(verdict.ratio) else None
        verdict = None if error is None else judge_relative(found, dtype, reference_error=error, samples=samples)
    reason = None
    if tolerance is None and error is None:
        reason = f"products in {products} are permitted here, and the CPU's own error with such products is unknown"
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
        chunks=None if reason else lambda: exact_chunks(actual, exact, limit),
        reason=reason,
        outside=lambda: {} if verdict is None else {"allowed": verdict.allowed},
        reference_error=error,
        reference_samples=None if verdict is None else samples,
        exact=exact,
        evidence={} if products == yardstick.PLAIN else {"products": products},
    )
