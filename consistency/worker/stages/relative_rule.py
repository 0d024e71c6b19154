"""The `relative` rule of `forward` and `gradient`: errors against float64, relative to those that rounding makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.file_tensor import Readable, mapped
from consistency.numerics.rules import RoundingError, Rule, Verdict, judge_relative, passes
from consistency.worker import cpu_error
from consistency.worker.model.float64_reference import Reference
from consistency.worker.stages.context import Context

Read = Callable[[str], Readable | None]
"""Return a tensor by name, None where there is none."""


def rounding_errors(
    names: Iterable[str], drawn: Mapping[str, Sequence[Read]], exact: Read, samples: Callable[[Readable, Readable], int]
) -> dict[str, dict[str, RoundingError]]:
    """Measure the errors that rounding makes, by the name of the products and by tensor, one tensor at a time.

    Parameters
    ----------
    drawn : mapping of str to sequence of callable
        The tensors of the passes with noise, by the name of the products.
    samples : callable
        Counts the independent errors of a tensor in one pass.
    """
    names = list(names)
    errors: dict[str, dict[str, RoundingError]] = {}
    for title, reads in drawn.items():
        errors[title] = {}
        for name in names:
            truth = exact(name)
            tensors = [tensor for read in reads if (tensor := read(name)) is not None]
            if (
                truth is not None
                and 0 not in truth.shape
                and tensors
                and all(tensor.shape == truth.shape for tensor in tensors)
            ):
                errors[title][name] = cpu_error.rounding_error(tensors, truth, samples)
    return errors


def record_relative(
    context: Context,
    stage: str,
    layer: str,
    tensor: str,
    *,
    actual: Readable,
    digests: Sequence[TensorDigest],
    reference: Reference,
    name: str,
    mode: str,
    computed_by: str = "",
    decisions: str = "",
    reason: str = "",
    more: Mapping[str, Any] | None = None,
) -> None:
    """Record a tensor by the `relative` rule or the user's tolerance; without an exact value by the other workers.

    `reference` has the error of rounding and the exact tensor by `name`, and by `mode` why there is none;
    `computed_by` is how this device computed, where not by its own kernels; `decisions` says whose are in it, where not
    its own, and `reason` why it cannot be compared with the exact tensor; `more` is added to the evidence.
    """
    tables = reference.tables
    exact, whole = reference.read(name), mapped(actual)
    products = cpu_error.products_on(context.model, context.device)
    plain, error = (tables.errors.get(title, {}).get(name) for title in (cpu_error.PLAIN, products))
    tolerance = context.record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    known = exact is not None and exact.shape == actual.shape and actual.dtype in UNIT_ROUNDOFF
    evidence = {**({"products": products} if products != cpu_error.PLAIN else {}), **(more or {})}
    if computed_by:
        evidence["computed_by"] = computed_by
    if decisions:
        evidence["decisions"] = decisions
    judged = error is not None or tolerance is not None or products != cpu_error.PLAIN
    if exact is None or not known or not judged or reason:
        context.record.computed(
            stage, layer, tensor, actual=whole, digests=digests, chunks=tuple,
            reason=reason or tables.failures.get(mode), evidence=evidence,
        )  # fmt: skip
        return
    found = measure_against_exact(actual, exact, tolerance)
    verdict: Verdict | None = None
    if tolerance is None:
        dtype = name_of(actual.dtype)
        if error is None and plain is not None:  # what is within the stricter tolerance needs no other
            error = plain if passes(judge_relative(found, dtype, plain).ratio) else None
        verdict = None if error is None else judge_relative(found, dtype, error)
        if verdict is not None and tables.computed_by:
            evidence["reference_error_by"] = tables.computed_by
    why = None
    if tolerance is None and error is None:
        why = f"products in {products} are permitted here, and what rounding makes with such products is unknown"
    limit: float | UserAllowance | None = tolerance if verdict is None else verdict.allowed
    context.record.computed(
        stage,
        layer,
        tensor,
        actual=whole,
        digests=digests,
        found=found,
        rule=Rule.RELATIVE,
        tolerance=tolerance,
        ratio=None if verdict is None else verdict.ratio,
        chunks=None if why else lambda: exact_chunks(actual, exact, limit),
        reason=why,
        outside=lambda: {} if verdict is None else {"allowed": verdict.allowed},
        rounding=error,
        exact=mapped(exact),
        evidence=evidence,
    )


def error_in(context: Context, reference: Reference, name: str) -> RoundingError | None:
    """Return the error that rounding makes in a tensor with the products that this device may compute with."""
    return reference.tables.errors.get(cpu_error.products_on(context.model, context.device), {}).get(name)
