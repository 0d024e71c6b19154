"""The `block` rule: results of blocks on equal inputs, in units of what rounding makes in each element."""

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
from consistency.worker.recorder import TracedOperation, TraceWrong

ROWS = 32
"""Of all passes together, for which more are computed."""

T = TypeVar("T")

Read = Callable[[str], Readable | None]
"""Return a tensor by name, None where there is none."""


def passes_for(model: torch.nn.Module, tokens: int, rows: Iterable[int]) -> int:
    """Return how many passes with noise to compute, by the tokens of one and the rows of each result."""
    is_large = cpu_error.is_large(cpu_error.passes_for(matrix_elements(model) * tokens))
    least = LEAST_PASSES - 1 if is_large else LEAST_PASSES
    return max(least, min(MOST_PASSES, -(-ROWS // max(1, min(rows, default=ROWS)))))


def passes_for_sums(context: Context, model: torch.nn.Module) -> int:
    """Return how many to compute of gradients of a model that is loaded."""
    return noisy_gradients(context.job.case, matrix_elements(model))


def draw(
    context: Context, model: torch.nn.Module, compute: Callable[[str], T], passes: int, *, named: str = ""
) -> dict[str, list[T]]:
    """Compute passes with noise, by the name of the products of each worker's, with `named` added."""
    found: dict[str, list[T]] = {}
    products_of_run = cpu_error.products_of_run(context.job, model)
    count = len(products_of_run)
    for number, (products_name, products) in enumerate(products_of_run.items()):
        title = f"{products_name}{named}"
        with context.events.part_of_stage(number / count, (number + 1) / count):
            for seed in range(passes):
                context.events.step(f"with noise, {title}", seed, passes)
                with cpu_error.with_noise(products, seed):
                    found.setdefault(title, []).append(compute(title))
    return found


def rows_of(tensor: torch.Tensor) -> int:
    """Return how many rows a tensor has; one is a vector."""
    return tensor[..., 0].numel() if tensor.dim() > 1 else 1


def spreads(
    drawn: Mapping[str, Sequence[Read]], exact: Mapping[str, torch.Tensor], sums: Collection[str] = ()
) -> dict[str, dict[str, Spread]]:
    """Return what rounding makes in each exact tensor, by the name of the products and by name.

    `sums` are those whose rows are sums over tokens.
    """
    found: dict[str, dict[str, Spread]] = {}
    for title, reads in drawn.items():
        found[title] = {}
        for name, truth in exact.items():
            tensors = [mapped(tensor) for read in reads if (tensor := read(name)) is not None]
            fits = len(tensors) > 1 and all(one.shape == truth.shape for one in tensors)
            if fits and truth.numel() and tensors[0].dtype in UNIT_ROUNDOFF:
                found[title][name] = Spread.of(tensors, truth, of_a_sum=name in sums)
    return found


def named_factors(found: Mapping[str, Mapping[str, Spread]]) -> dict[str, torch.Tensor]:
    """Return the variances of rows and columns by names for a file: see `spread_in`."""
    return {
        f"{title}|{kind}|{name}": factor
        for title, of_title in found.items()
        for name, spread in of_title.items()
        for kind, factor in (("rows", spread.rows), ("columns", spread.columns))
    }


def limits_of(found: Mapping[str, Mapping[str, Spread]]) -> dict[str, dict[str, ErrorLimits]]:
    """Return the limits by the name of the products and by name."""
    return {title: {name: one.limits for name, one in of.items()} for title, of in found.items()}


def spread_in(reference: Reference, title: str, name: str) -> Spread | None:
    """Return what rounding makes in a tensor, of a published reference."""
    limits = reference.tables.limits.get(title, {}).get(name)
    if limits is None:
        return None
    rows, columns = (reference.known(f"{title}|{kind}|{name}") for kind in ("rows", "columns"))
    return Spread(rows=rows, columns=columns, limits=limits)


def spread_of(context: Context, reference: Reference, name: str) -> Spread | None:
    """Return the same with the products that this device may compute with."""
    return spread_in(reference, cpu_error.products_on(context.model, context.device), name)


def record_given(context: Context, stage: str, mode: str, reference: Reference) -> None:
    """Record the bits of what the blocks of a mode are given: those of another host's float64 pass may be others."""
    names = sorted(name for name in reference.tables.names if name.startswith(given_name(mode, "")))
    tensors = [mapped(tensor) for name in names if (tensor := reference.read(name)) is not None]
    digests = [[int(digest(one).value[at : at + 15], 16) for at in (0, 15)] for one in tensors]
    bits = torch.tensor(digests, dtype=torch.int64).view(torch.float64)
    row = TensorRecord(stage, WHOLE_MODEL, f"{mode}.{GIVEN}", rule=Rule.PEER, status="measured", reason=OTHER_HOST)
    context.record.computed(row, bits)


OTHER_HOST = (
    "what its blocks are given has other bits, of other weights, another config or inputs, or of float64 that rounds "
    "otherwise on this host; and so may have what a healthy device of the same kind computes"
)


def block_ratio(
    context: Context, stage: str, layer: str, actual: torch.Tensor, reference: Reference, name: str
) -> float | None:
    """Return the figures of a result over their limits, or its error over the user's; None where it is not judged."""
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
        With the reason why it cannot be compared with the exact tensor, if there is one.
    actual : torch.Tensor
        On the CPU.
    name, exact_name : str
        Of what rounding makes, and of the exact tensor where that has another name, in the reference.
    named : str
        Added to the name of this device's products.
    """
    record, products = context.record, cpu_error.products_on(context.model, context.device)
    exact = reference.read(exact_name or name)
    tolerance = record.tolerance(stage=row.stage, layer=row.layer, dtype=actual.dtype)
    spread = spread_in(reference, f"{products}{named}", name)
    if exact is not None and exact.shape == actual.shape and not actual.is_floating_point():
        # ids, positions or a mask, which no rounding changes
        moved = TensorRecord(*row.key, rule=Rule.BITWISE, status="equal", repeats=tuple(d.value for d in digests[1:]))
        record.moved(moved, actual=actual, expected=mapped(exact).to(actual.dtype))
        return
    row = replace(row, evidence={**({} if products == cpu_error.PLAIN else {"products": products}), **row.evidence})
    known = exact is not None and exact.shape == actual.shape and actual.dtype in UNIT_ROUNDOFF
    if not known or row.reason or (tolerance is None and spread is None):
        record.computed(row, actual, digests=digests, chunks=tuple)
        return
    assert exact is not None
    truth = mapped(exact)
    if tolerance is not None or spread is None:
        record.computed(
            row,
            actual,
            digests=digests,
            found=measure_against_exact(actual, truth, tolerance),
            tolerance=tolerance,
            chunks=lambda: exact_chunks(actual, truth, tolerance),
            ingredients={"exact": truth},
        )
        return
    skipped = TensorRecord(*row.key, rule=Rule.BLOCK, status="skipped", dtype=name_of(actual.dtype))
    if why := _overflow(truth, actual.dtype, spread):
        record.write(replace(skipped, reason=why))
        return
    figures = spread.figures(actual, truth)
    is_within = passes(figures.ratio)
    if is_within and float(spread.limits.scale) >= 1 and bool(truth.any()):
        zeros = spread.figures(torch.zeros_like(actual), truth)
        if passes(zeros.ratio):
            record.write(replace(skipped, reason=ZEROS_PASS))
            return
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
        found=figures.stated(measure_against_exact(actual, truth, allowed)),
        chunks=lambda: exact_chunks(actual, truth, allowed),
        ingredients={"exact": truth, "allowed": allowed},
    )


def record_missed(context: Context, stage: str, row: tuple[str, str], dtype: torch.dtype, why: str) -> None:
    """Record a result that tells nothing of what this worker is for: of no device more is expected."""
    layer, tensor = row
    context.record.skipped(stage, why, tensor, layer=layer, rule=Rule.BLOCK, dtype=name_of(dtype), unsupported=True)


ZEROS_PASS = "its passes with noise have too few independent errors: zeros would pass"


def _overflow(exact: torch.Tensor, dtype: torch.dtype, spread: Spread) -> str:
    """Return why a tensor is not judged whose exact values the dtype has not, or not what they are made from."""
    if not math.isfinite(spread.limits.row):
        return f"passes in {name_of(dtype)} on the CPU are {OVERFLOWS}: there is no error to compare with"
    largest = max(abs(float(exact.min())), abs(float(exact.max())))
    if not math.isfinite(largest):
        largest = float(torch.where(exact.isfinite(), exact, 0.0).abs().max())
    if largest <= torch.finfo(dtype).max:
        return ""
    return f"exact values up to {largest:.3g} overflow {name_of(dtype)}, whose largest is {torch.finfo(dtype).max:.6g}"


NOT_REPLAYED = "this worker decided otherwise, and its pass cannot be computed again with the reference's decisions"


def record_flips(
    context: Context, stage: str, flips: Sequence[Flip], *, mode: str = "", more: Mapping[str, object] | None = None
) -> None:
    """Record decisions that differ, with `more` as evidence: within, where rounding explains it; else outside."""
    by_place: dict[tuple[str, str], list[Flip]] = {}
    for flip in flips:
        by_place.setdefault((flip.place, flip.name), []).append(flip)
    for (place, name), same in by_place.items():
        if not context.record.wants(stage, place):
            continue
        worst = max(same, key=lambda flip: ratio(flip.margin, flip.allowed))
        number = counted(sum(flip.elements for flip in same), "decision")
        margin = f"margin {worst.margin:.3g}, where rounding explains {worst.allowed:.3g} at most"
        text = f"{number} of {name} in {place} {{}}: {margin}"
        context.record.fact(
            stage=stage,
            layer=place,
            tensor=f"{name}.{DECISIONS}" + (f".{mode}" if mode else ""),
            status="within" if worst.is_undecided else "outside",
            word=None if worst.is_undecided else words.DECISION_FLIPPED,
            share=ratio(worst.margin, worst.allowed),
            reason=text.format("undecided" if worst.is_undecided else "flipped"),
            evidence={
                "flipped": sum(f.elements for f in same),
                "margin": worst.margin,
                "allowed": worst.allowed,
                **(more or {}),
            },
        )


def computed_again(
    context: Context,
    names: Mapping[tuple[str, str], str],
    run: Callable[[Saw], None],
    computing: Callable[[], AbstractContextManager[None]],
) -> TraceWrong:
    """Return what traces a result that blocks make, by running the pass again.

    Parameters
    ----------
    names : mapping
        Of the results in the pass, by layer and tensor.
    computing : callable
        Gives what computes on this device in place of slow kernels.
    """

    def trace(layer: str, tensor: str, share: Callable[[torch.Tensor], float]) -> TracedOperation | None:
        if (layer, tensor) not in names:
            return None
        context.events.step(f"{layer}, computed again", 0, 1)
        products = products_of(context.device)
        try:
            with torch.no_grad(), computing():
                traced = trace_module(context.model, layer, names[layer, tensor], context.device, run)
                parts, again = kept_parts(traced, context.device, products, share)
        except NotTracedError as error:
            return {}, {NOT_RECOMPUTED: str(error)}
        except Exception as error:  # model code of any kind may raise anything, and what is found is found
            return {}, {NOT_RECOMPUTED: first_line(error)}
        return parts, {COMPUTED_AGAIN: Real(again)}

    return trace
