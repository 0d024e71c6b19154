"""Judge by the `block` rule: results of blocks on equal inputs, in units of each element's rounding errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from msgspec.structs import replace

from consistency.capture.names import COMPUTED_AGAIN, DECISIONS, GIVEN, LIMITS, NOT_RECOMPUTED, OVERFLOWS, WHOLE_MODEL
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted
from consistency.case.budget.costs import LEAST_PASSES, MOST_PASSES, noisy_gradients
from consistency.errors import first_line
from consistency.numerics import words
from consistency.numerics.chunks import Chunks, exact_chunks
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.diagnosis_computed import diagnose_computed
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.error_spread import ErrorLimits, Spread
from consistency.numerics.file_tensor import Readable, mapped
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import RoundingError, Rule, passes, ratio
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.decisions.track import Flip
from consistency.worker.model.call_trace import NotTracedError, Saw, kept_parts, trace_module
from consistency.worker.model.float64_reference import Reference, given_name
from consistency.worker.model.running import matrix_elements
from consistency.worker.precision import products_of
from consistency.worker.recorder import TracedOperation, TraceWrong, UserTolerance

ROWS = 32
"""Rows of a result that all passes together are to have; more passes are computed for a result of fewer rows."""

T = TypeVar("T")

Read = Callable[[str], Readable | None]
"""Return a tensor by name, None where there is none."""


def passes_for(model: torch.nn.Module, tokens: int, rows: Iterable[int]) -> int:
    """Return the number of noisy passes to compute, by the tokens of one pass and the rows of each result."""
    is_large = cpu_error.is_large(cpu_error.passes_for(matrix_elements(model) * tokens))
    # one noisy pass of a large model is a good part of the work
    least = LEAST_PASSES - 1 if is_large else LEAST_PASSES
    fewest_rows = max(1, min(rows, default=ROWS))
    wanted = -(-ROWS // fewest_rows)  # rounded up
    return max(least, min(MOST_PASSES, wanted))


def passes_for_sums(context: Context, model: torch.nn.Module) -> int:
    """Return the number of noisy passes to compute for the gradients of a loaded model, whose rows are sums."""
    return noisy_gradients(context.job.case, matrix_elements(model))


def draw(
    context: Context, model: torch.nn.Module, compute: Callable[[str], T], passes: int, *, named: str = ""
) -> dict[str, list[T]]:
    """Compute noisy passes with the products of every worker of the run.

    Parameters
    ----------
    compute : callable
        Computes one pass, given its title.
    passes : int
        Number of passes for each kind of products.
    named : str
        Added to the names of the products.

    Returns
    -------
    dict of str to list
        The passes' results by title: the name of their products, and `named`.
    """
    results: dict[str, list[T]] = {}
    products_of_run = cpu_error.products_of_run(context.job, model)
    count = len(products_of_run)
    for number, (products_name, products) in enumerate(products_of_run.items()):
        title = f"{products_name}{named}"
        with context.events.part_of_stage(number / count, (number + 1) / count):
            for seed in range(passes):
                context.events.step(f"with noise, {title}", seed, passes)
                with cpu_error.with_noise(products, seed):
                    results.setdefault(title, []).append(compute(title))
    return results


def rows_of(tensor: torch.Tensor) -> int:
    """Return the number of rows of a tensor; a vector is one row."""
    return tensor[..., 0].numel() if tensor.dim() > 1 else 1


def spreads(
    drawn: Mapping[str, Sequence[Read]], exact: Mapping[str, torch.Tensor], sums: Collection[str] = ()
) -> dict[str, dict[str, Spread]]:
    """Return the spread of the errors that rounding makes in each exact tensor, by title of the passes and by name.

    A tensor has none where fewer than two passes have it, where its shape differs, and where its dtype rounds nothing.

    Parameters
    ----------
    drawn : mapping
        Functions that read the tensors of one noisy pass, by title.
    sums : collection of str
        Names of the tensors whose rows are sums over tokens.
    """
    spreads_by_title: dict[str, dict[str, Spread]] = {}
    for title, reads in drawn.items():
        by_name = spreads_by_title[title] = {}
        for name, truth in exact.items():
            tensors = _drawn_tensors(reads, name)
            # a single pass has no spread
            fits = len(tensors) > 1 and all(tensor.shape == truth.shape for tensor in tensors)
            if fits and truth.numel() and tensors[0].dtype in UNIT_ROUNDOFF:
                by_name[name] = Spread.of(tensors, truth, of_a_sum=name in sums)
    return spreads_by_title


def _drawn_tensors(reads: Iterable[Read], name: str) -> list[torch.Tensor]:
    """Return the tensors of a name of all passes that have one."""
    readables = [read(name) for read in reads]
    return [mapped(readable) for readable in readables if readable is not None]


def named_factors(found: Mapping[str, Mapping[str, Spread]]) -> dict[str, torch.Tensor]:
    """Return the variances of rows and columns of `spreads` by names for a file: see `spread_in`."""
    factors: dict[str, torch.Tensor] = {}
    for title, by_name in found.items():
        for name, spread in by_name.items():
            factors[f"{title}|rows|{name}"] = spread.rows
            factors[f"{title}|columns|{name}"] = spread.columns
    return factors


def limits_of(found: Mapping[str, Mapping[str, Spread]]) -> dict[str, dict[str, ErrorLimits]]:
    """Return the limits of `spreads`, by title of the passes and by name."""
    limits: dict[str, dict[str, ErrorLimits]] = {}
    for title, by_name in found.items():
        limits[title] = {name: spread.limits for name, spread in by_name.items()}
    return limits


def spread_in(reference: Reference, title: str, name: str) -> Spread | None:
    """Return the spread of rounding errors in a tensor of a published reference, None where it has none."""
    limits = reference.tables.limits.get(title, {}).get(name)
    if limits is None:
        return None
    rows, columns = (reference.known(f"{title}|{kind}|{name}") for kind in ("rows", "columns"))
    return Spread(rows=rows, columns=columns, limits=limits)


def spread_of(context: Context, reference: Reference, name: str) -> Spread | None:
    """Return the spread in a tensor for passes with the products that this device may compute with."""
    return spread_in(reference, cpu_error.products_on(context.model, context.device), name)


def record_given(context: Context, stage: str, mode: str, reference: Reference) -> None:
    """Record the digests of all given values of a mode as one tensor, which another host's float64 pass may not share.

    15 hexadecimal digits fit an int64; two such numbers of each digest are compared, as the bits of float64.
    """
    names = sorted(name for name in reference.tables.names if name.startswith(given_name(mode, "")))
    digits: list[list[int]] = []
    for name in names:
        tensor = reference.read(name)
        if tensor is not None:
            value = digest(mapped(tensor)).value
            digits.append([int(value[:15], 16), int(value[15:30], 16)])
    bits = torch.tensor(digits, dtype=torch.int64).view(torch.float64)
    row = TensorRecord(stage, WHOLE_MODEL, f"{mode}.{GIVEN}", rule=Rule.PEER, status="measured", reason=OTHER_HOST)
    context.record.computed(row, bits)


OTHER_HOST = (
    "the inputs of its blocks differ bitwise from the reference's (other weights, another config, other inputs, or "
    "float64 that rounds differently on this host), so a healthy device of the same kind may compute other bits too"
)


def block_ratio(
    context: Context, stage: str, layer: str, actual: torch.Tensor, reference: Reference, name: str
) -> float | None:
    """Return the ratio of a result by the `block` rule, or by the user's tolerance; None where it is not judged."""
    exact = reference.read(name)
    if exact is None or exact.shape != actual.shape or actual.dtype not in UNIT_ROUNDOFF:
        return None
    truth = mapped(exact)
    tolerance = context.record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    if tolerance is not None:
        return float(measure_against_exact(actual, truth, tolerance).ratio or 0)
    spread = spread_of(context, reference, name)
    if spread is None or _overflow(truth, actual.dtype, spread):
        return None
    return spread.figures(actual, truth).ratio


def record_block(
    context: Context,
    row: TensorRecord,
    actual: torch.Tensor,
    *,
    digests: Sequence[TensorDigest] = (),
    reference: Reference,
    name: str,
    exact_name: str = "",
    named: str = "",
) -> None:
    """Record a result by the `block` rule or the user's tolerance; without an exact value by the other workers.

    Parameters
    ----------
    row : TensorRecord
        The row to complete; its reason says why it cannot be compared with the exact tensor, if that is so.
    actual : torch.Tensor
        The result, on the CPU.
    name, exact_name : str
        Names in the reference: of the spread of rounding errors, and of the exact tensor where that has another name.
    named : str
        Added to the name of this device's products.
    """
    record, products = context.record, cpu_error.products_on(context.model, context.device)
    exact = reference.read(exact_name or name)
    tolerance = record.tolerance(stage=row.stage, layer=row.layer, dtype=actual.dtype)
    spread = spread_in(reference, f"{products}{named}", name)
    if exact is not None and exact.shape != actual.shape:
        exact = None
    if exact is not None and not actual.is_floating_point():
        # ids, positions or a mask, which no rounding changes
        repeats = tuple(repeat.value for repeat in digests[1:])
        moved = TensorRecord(*row.key, rule=Rule.BITWISE, status="equal", repeats=repeats)
        record.moved(moved, actual=actual, expected=mapped(exact).to(actual.dtype))
        return
    if products != cpu_error.PLAIN:
        row = replace(row, evidence={"products": products, **row.evidence})
    if exact is None or actual.dtype not in UNIT_ROUNDOFF or row.reason:
        record.computed(row, actual, digests=digests, chunks=tuple)
    elif tolerance is not None:
        _record_by_tolerance(context, row, actual, digests=digests, truth=mapped(exact), tolerance=tolerance)
    elif spread is not None:
        _record_by_spread(context, row, actual, digests=digests, truth=mapped(exact), spread=spread)
    else:
        record.computed(row, actual, digests=digests, chunks=tuple)


def _record_by_tolerance(
    context: Context,
    row: TensorRecord,
    actual: torch.Tensor,
    *,
    digests: Sequence[TensorDigest],
    truth: torch.Tensor,
    tolerance: UserTolerance,
) -> None:
    """Record a result by the user's tolerance around the exact tensor."""
    context.record.computed(
        row,
        actual,
        digests=digests,
        measure=measure_against_exact(actual, truth, tolerance),
        tolerance=tolerance,
        chunks=lambda: exact_chunks(actual, truth, tolerance),
        ingredients={"exact": truth},
    )


def _record_by_spread(
    context: Context,
    row: TensorRecord,
    actual: torch.Tensor,
    *,
    digests: Sequence[TensorDigest],
    truth: torch.Tensor,
    spread: Spread,
) -> None:
    """Record a result by the `block` rule, or why the rule cannot judge it."""
    record = context.record
    skipped = TensorRecord(*row.key, rule=Rule.BLOCK, status="skipped", dtype=name_of(actual.dtype))
    if why := _overflow(truth, actual.dtype, spread):
        record.write(replace(skipped, reason=why))
        return
    figures = spread.figures(actual, truth)
    is_within = passes(figures.ratio)
    # a rule by which zeros pass in place of values tells nothing: such a result is not called right
    if is_within and float(spread.limits.scale) >= 1 and bool(truth.any()):
        zeros = spread.figures(torch.zeros_like(actual), truth)
        if passes(zeros.ratio):
            record.write(replace(skipped, reason=ZEROS_PASS))
            return
    # the tolerance of each element is for a diagnosis and a reproducer, of a result outside the rule alone
    allowed = None if is_within else spread.allowed(truth, actual.dtype)

    def diagnose(found: Measure, chunks: Chunks) -> Diagnosis:
        cause = Diagnosis(word=figures.word) if figures.word is not None else diagnose_computed(found, chunks)
        return Diagnosis(
            word=cause.word, evidence={**cause.evidence, **figures.evidence(), LIMITS: spread.limits.of_figures()}
        )

    rounding = RoundingError(largest=spread.limits.largest, samples=rows_of(truth), drawn=spread.limits.drawn)
    record.computed(
        replace(row, rounding=rounding),
        actual,
        digests=digests,
        diagnose=diagnose,
        measure=figures.stated(measure_against_exact(actual, truth, allowed)),
        chunks=lambda: exact_chunks(actual, truth, allowed),
        ingredients={"exact": truth, "allowed": allowed},
    )


def record_missed(context: Context, stage: str, row: tuple[str, str], dtype: torch.dtype, why: str) -> None:
    """Record that a result is not judged, as it was computed without the attention kernel that this worker tests.

    Parameters
    ----------
    row : tuple of str
        Layer and tensor.
    why : str
        The reason, which holds for every device: none is expected to do more.
    """
    layer, tensor = row
    context.record.skipped(stage, why, tensor, layer=layer, rule=Rule.BLOCK, dtype=name_of(dtype), unsupported=True)


ZEROS_PASS = "too few values to tell rounding from a wrong result: a tolerance that wide would let zeros pass"


def _overflow(exact: torch.Tensor, dtype: torch.dtype, spread: Spread) -> str:
    """Return why a tensor is not judged whose exact values, or values on the way to them, overflow the dtype.

    Empty where neither does.
    """
    if not math.isfinite(spread.limits.row):
        return f"passes in {name_of(dtype)} on the CPU are {OVERFLOWS}: there is no error to compare with"
    largest = max(abs(float(exact.min())), abs(float(exact.max())))
    if not math.isfinite(largest):  # infinite values are no overflow: every dtype has them
        largest = float(torch.where(exact.isfinite(), exact, 0.0).abs().max())
    if largest <= torch.finfo(dtype).max:
        return ""
    return f"exact values up to {largest:.3g} overflow {name_of(dtype)}, whose largest is {torch.finfo(dtype).max:.6g}"


NOT_REPLAYED = (
    "the model decided otherwise on this worker (a router or top-k chose other indices), and its pass cannot be "
    "repeated with the reference's decisions"
)


def record_flips(
    context: Context, stage: str, flips: Sequence[Flip], *, mode: str = "", evidence: Mapping[str, object] | None = None
) -> None:
    """Record decisions that differ, one row for each operation of a module, with `evidence` added to that of each row.

    A row is within where rounding explains the worst of its decisions, else outside.
    """
    by_place: dict[tuple[str, str], list[Flip]] = {}
    for flip in flips:
        by_place.setdefault((flip.place, flip.name), []).append(flip)
    for (place, name), flips_there in by_place.items():
        if not context.record.wants(stage, place):
            continue
        worst = max(flips_there, key=lambda flip: ratio(flip.margin, flip.allowed))
        elements = sum(flip.elements for flip in flips_there)
        verb = "undecided" if worst.is_undecided else "flipped"
        margin = f"margin {worst.margin:.3g}, where rounding explains {worst.allowed:.3g} at most"
        suffix = f".{mode}" if mode else ""
        context.record.fact(
            stage=stage,
            layer=place,
            tensor=f"{name}.{DECISIONS}{suffix}",
            status="within" if worst.is_undecided else "outside",
            word=None if worst.is_undecided else words.DECISION_FLIPPED,
            ratio=ratio(worst.margin, worst.allowed),
            reason=f"{counted(elements, 'decision')} of {name} in {place} {verb}: {margin}",
            evidence={
                "flipped": elements,
                "margin": worst.margin,
                "allowed": worst.allowed,
                **(evidence or {}),
            },
        )


def computed_again(
    context: Context,
    names: Mapping[tuple[str, str], str],
    run: Callable[[Saw], None],
    computing: Callable[[], AbstractContextManager[None]],
) -> TraceWrong:
    """Return a function that traces a result of a block by running the pass again.

    Parameters
    ----------
    names : mapping
        Names of the results in the pass, by layer and tensor.
    run : callable
        Runs the pass.
    computing : callable
        Returns a context manager that replaces slow kernels on this device.
    """

    def trace(layer: str, tensor: str, ratio_of: Callable[[torch.Tensor], float]) -> TracedOperation | None:
        if (layer, tensor) not in names:
            return None
        context.events.step(f"{layer}, computed again", 0, 1)
        products = products_of(context.device)
        try:
            with torch.no_grad(), computing():
                traced = trace_module(context.model, layer, names[layer, tensor], context.device, run)
                tensors, ratio_again = kept_parts(traced, context.device, products, ratio_of)
        except NotTracedError as error:
            return {}, {NOT_RECOMPUTED: str(error)}
        except Exception as error:  # model code of any kind may raise anything, and the row is recorded nevertheless
            return {}, {NOT_RECOMPUTED: first_line(error)}
        return tensors, {COMPUTED_AGAIN: Real(ratio_again)}

    return trace
