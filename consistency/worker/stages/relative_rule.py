"""The `relative` rule of `forward` and `gradient`: errors against float64, relative to the CPU's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.file_tensor import Readable, mapped
from consistency.numerics.real import Real
from consistency.numerics.rules import Rule, Verdict, judge_relative, passes
from consistency.worker import yardstick
from consistency.worker.model.float64_reference import Reference, Tables
from consistency.worker.precision import products_of
from consistency.worker.stages.context import Context

Read = Callable[[str], Readable | None]
"""Return a tensor by name, None where there is none."""


def own_errors(
    names: Iterable[str],
    own: Read,
    exact: Read,
    *,
    samples: Callable[[Readable, Readable], int],
    failures: Mapping[str, str],
    known: Iterable[str],
    others: Mapping[str, Read],
    computed_by: str = "",
) -> Tables:
    """Measure the CPU's own errors, one tensor at a time.

    Parameters
    ----------
    samples : callable
        Counts the independent errors of a tensor.
    failures : mapping of str to str
        Why a mode has no exact tensors.
    known : iterable of str
        Names of the exact tensors.
    others : mapping of str to callable
        The CPU's tensors with other products, by the name of these (`consistency.worker.yardstick`): those in float32
        too, where the CPU's settings permit others.
    computed_by : str
        How the CPU computed, where not by its own kernels.
    """
    names = list(names)

    def pairs(read: Read) -> Iterator[tuple[str, Readable, Readable]]:
        for name in names:
            actual, truth = read(name), exact(name)
            if actual is not None and truth is not None and actual.shape == truth.shape:
                yield name, actual, truth

    def errors(read: Read) -> dict[str, Real]:
        return {name: measure_against_exact(actual, truth).max_abs for name, actual, truth in pairs(read)}

    in_float32 = not products_of(torch.device("cpu")).is_reduced
    return Tables(
        errors=errors(own if in_float32 else others.get(yardstick.PLAIN, lambda _: None)),
        samples={name: samples(actual, truth) for name, actual, truth in pairs(own)},
        failures=dict(failures),
        names=tuple(known),
        errors_with={title: errors(read) for title, read in others.items()},
        computed_by=computed_by,
    )


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
    exact_name: str,
    mode: str,
    computed_by: str = "",
    decisions: str = "",
    reason: str = "",
    more: Mapping[str, str] | None = None,
) -> None:
    """Record a tensor by the `relative` rule or the user's tolerance; without an exact value by the other workers.

    `reference` has the CPU's own error by `name`, the exact tensor by `exact_name`, and by `mode` why there is none;
    `computed_by` is how this device computed, where not by its own kernels; `decisions` says whose are in it, where not
    its own, and `reason` why it cannot be compared with the exact tensor; `more` is added to the evidence.
    """
    tables = reference.tables
    exact, whole = reference.read(exact_name), mapped(actual)
    products = yardstick.name_of(yardstick.products_in(context.model, products_of(context.device)))
    plain, samples = tables.errors.get(name), tables.samples.get(name, 1)
    error = plain if products == yardstick.PLAIN else tables.errors_with.get(products, {}).get(name)
    tolerance = context.record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    known = exact is not None and exact.shape == actual.shape and actual.dtype in UNIT_ROUNDOFF
    evidence = {**({"products": products} if products != yardstick.PLAIN else {}), **(more or {})}
    if computed_by:
        evidence["computed_by"] = computed_by
    if decisions:
        evidence["decisions"] = decisions
    judged = error is not None or tolerance is not None or products != yardstick.PLAIN
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
            verdict = judge_relative(found, dtype, reference_error=float(plain), samples=samples)
            error = plain if passes(verdict.ratio) else None
        verdict = None if error is None else judge_relative(found, dtype, reference_error=float(error), samples=samples)
        if verdict is not None and tables.computed_by:
            evidence["reference_error_by"] = tables.computed_by
    why = None
    if tolerance is None and error is None:
        why = f"products in {products} are permitted here, and the CPU's own error with such products is unknown"
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
        bound_ratio=None if verdict is None else verdict.ratio,
        chunks=None if why else lambda: exact_chunks(actual, exact, limit),
        reason=why,
        outside=lambda: {} if verdict is None else {"allowed": verdict.allowed},
        reference_error=None if error is None else float(error),
        reference_samples=None if verdict is None else samples,
        exact=mapped(exact),
        evidence=evidence,
    )
