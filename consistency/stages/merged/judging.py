"""The tensors of a layer that a merge made: their measures against their exact values, and their records."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from consistency.capture.names import DELTA, SAFE_WEIGHT, WEIGHT
from consistency.capture.records import Effect, TensorRecord
from consistency.numerics.bound import Allowance
from consistency.numerics.chunks import Chunk, Chunks, LowRankProduct, LowRankTensor, exact_chunks, low_rank_chunks
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.diagnosis_computed import diagnose_computed
from consistency.numerics.digest import TensorDigest
from consistency.numerics.error import measure_against_exact, measure_low_rank
from consistency.numerics.measure import Measure
from consistency.numerics.rules import RoundingError, Rule, passes
from consistency.stages.merged.forms.form import Form, Judged, whole
from consistency.worker.context import Context
from consistency.worker.model.low_rank import LowRank, allowance_of
from consistency.worker.recorder import KEEP_BYTES, UserTolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The reference of a merged weight: the factors of a LoRA and its base weight, a form, or a merge in float64.

    `lacks` names a tensor of the layer that the adapter's file does not hold.
    """

    low_rank: LowRank | None = None
    base: torch.Tensor | None = None
    form: Form | None = None
    exact: torch.Tensor | None = None
    lacks: str = ""

    def judges(self, tensor: torch.Tensor, *, safe: bool | None) -> bool:
        """Report whether there is an exact value of a tensor's shape."""
        if self.form is not None:
            return self.form.judges(tensor, safe=safe)
        if self.low_rank is not None:
            return tensor.shape == self.low_rank.shape
        return self.exact is not None and tensor.shape == self.exact.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A tensor that the device computed, and what judges it."""

    actual: torch.Tensor
    safe: bool | None
    """How it was merged; None for a delta."""
    digests: list[TensorDigest]
    """One per run on this device."""
    rule: Rule
    """The derived rule of its method."""
    truth: Truth
    tolerance: UserTolerance | None
    rounding: RoundingError | None = None
    """The error that rounding makes, where the layer has no closed form."""

    @property
    def tested(self) -> LowRankTensor:
        """The tensor on the CPU with its tolerance, where it is judged by its factors."""
        assert self.truth.low_rank is not None
        roundings = _count_roundings(self.truth, safe=self.safe)
        allowance = allowance_of(self.truth.low_rank, self.tolerance, self.actual, roundings=roundings)
        return LowRankTensor(actual=self.actual.to("cpu"), allowance=allowance, has_base=self.safe is not None)

    @property
    def by_form(self) -> Judged:
        """The tensor on the CPU, where a form judges it."""
        return Judged(actual=self.actual.to("cpu"), safe=self.safe, tolerance=self.tolerance)

    @property
    def bits(self) -> str:
        """The digest of the first run."""
        return self.digests[0].value

    @property
    def key(self) -> tuple[bool | None, str]:
        """Key of the tensor's measure among the measures of its layer: the way of merging, and the bits."""
        return self.safe, self.bits


def judge(
    context: Context,
    place: str,
    computed: Sequence[Computed],
    known: dict[str, tuple[Measure | None, RoundingError | None]],
) -> None:
    """Measure and record tensors that the device computed for a layer.

    `known` is filled with measure and error of rounding of each merged weight by its digest: the same bits have the
    same ones.
    """
    measures = _measure(computed, known)
    for tensor in computed:
        measure, rounding = measures.get(tensor.key), tensor.rounding
        is_delta = tensor.safe is None
        # bits that a plain merge has made already have its measure
        if not is_delta:
            measure, rounding = known.setdefault(tensor.bits, (measure, rounding))
        row = TensorRecord(
            "merged",
            place,
            _tensor_name(safe=tensor.safe),
            rule=tensor.rule,
            status="measured",
            rounding=rounding,
        )
        if is_delta:
            row = _as_delta_row(row, tensor, measure)
        context.record.computed(
            row,
            tensor.actual,
            digests=tensor.digests,
            measure=measure,
            chunks=functools.partial(_chunks, tensor),
            diagnose=functools.partial(_diagnose, tensor),
            tolerance=tensor.tolerance,
            ingredients=_ingredients(tensor, measure),
        )


def _as_delta_row(row: TensorRecord, delta: Computed, measure: Measure | None) -> TensorRecord:
    """Return the row of a delta: skipped unless it has an exact value, as the merged weight is judged."""
    reason = None
    if measure is None:
        reason = _why_not_judged(delta)
    effect: Effect = "zero-delta" if _is_zero(delta.actual) else ""
    return structs.replace(row, status="skipped", reason=reason, effect=effect)


def _tensor_name(*, safe: bool | None) -> str:
    if safe is None:
        return DELTA
    return SAFE_WEIGHT if safe else WEIGHT


def _why_not_judged(delta: Computed) -> str:
    """Return the reason of a delta without an exact value."""
    reason = "this method has no closed form of the delta"
    if delta.truth.lacks:
        reason = f"the adapter's file has no {delta.truth.lacks} of this layer"
    return f"{reason}: its merged weight is judged"


def _is_zero(delta: torch.Tensor) -> bool:
    """Return whether a delta is zero; its first row tells that nearly always, without a pass over all rows."""
    return not delta[:1].any() and not delta.any()


def _measure(computed: Sequence[Computed], known: Collection[str]) -> dict[tuple[bool | None, str], Measure]:
    """Measure tensors of a layer that have an exact value, in one pass; return their measures by `Computed.key`.

    `known` has the digests of merged weights that have been measured before.
    """
    tensors = list(_to_be_measured(computed, known))
    by_form = [tensor for tensor in tensors if tensor.truth.form is not None]
    others = [tensor for tensor in tensors if tensor.truth.form is None]
    low_rank = [tensor for tensor in others if tensor.truth.exact is None]
    measures: dict[tuple[bool | None, str], Measure] = {}
    for tensor in others:
        if tensor.truth.exact is not None:
            host = tensor.actual.to("cpu")
            measures[tensor.key] = measure_against_exact(host, tensor.truth.exact, tensor.tolerance)
    if low_rank:
        # a delta needs no base weight, and may come first: the truth that has one serves all
        truth = max((tensor.truth for tensor in low_rank), key=lambda truth: truth.base is not None)
        of_low_rank = measure_low_rank([tensor.tested for tensor in low_rank], _product(truth))
        measures |= zip((tensor.key for tensor in low_rank), of_low_rank, strict=True)
    if by_form:
        form = by_form[0].truth.form
        assert form is not None
        of_forms = form.measure([tensor.by_form for tensor in by_form])
        measures |= zip((tensor.key for tensor in by_form), of_forms, strict=True)
    return measures


def _to_be_measured(computed: Sequence[Computed], known: Collection[str]) -> Iterator[Computed]:
    """Yield the tensors that have an exact value, but of merged weights with the same bits only the first."""
    measured_bits = set(known)
    for tensor in computed:
        is_weight = tensor.safe is not None
        is_measured = is_weight and tensor.bits in measured_bits
        if is_measured or not tensor.truth.judges(tensor.actual, safe=tensor.safe):
            continue
        if is_weight:
            measured_bits.add(tensor.bits)
        yield tensor


def _count_roundings(truth: Truth, *, safe: bool | None) -> int:
    """Return how often a merge rounds to the weight's dtype; 0 for a delta (`safe` None)."""
    if safe is None:
        return 0
    rounds_delta = truth.low_rank is not None and truth.low_rank.rounds_delta
    return 2 if safe or rounds_delta else 1


def _product(truth: Truth) -> LowRankProduct:
    low_rank = truth.low_rank
    assert low_rank is not None
    return LowRankProduct(left=low_rank.left, right=low_rank.right, scaling=low_rank.scaling, base=truth.base)


def _chunks(tensor: Computed) -> Iterator[Chunk]:
    """Yield a tensor with its exact values and tolerances."""
    truth = tensor.truth
    if truth.form is not None:
        return truth.form.chunks(tensor.by_form)
    if truth.low_rank is not None:
        return low_rank_chunks(tensor.tested, _product(truth))
    assert truth.exact is not None  # a ratio without factors is one by the user's own tolerance
    assert tensor.tolerance is not None
    return exact_chunks(tensor.actual.to("cpu"), truth.exact, tensor.tolerance)


def _diagnose(tensor: Computed, found: Measure, chunks: Chunks) -> Diagnosis:
    """Name the difference of a tensor outside its rule.

    Where factors judge it by the derived bound, the diagnosis also tries the bound of products in TF32, and its
    evidence is how the bound was made.
    """
    truth, low_rank = tensor.truth, tensor.truth.low_rank
    if low_rank is None or truth.form is not None:
        return diagnose_computed(found, chunks)

    def measure_in_tf32() -> Measure:
        roundings = _count_roundings(truth, safe=tensor.safe)
        tf32_bound = allowance_of(low_rank, None, tensor.actual, roundings=roundings, tf32=True)
        (measure,) = measure_low_rank([replace(tensor.tested, allowance=tf32_bound)], _product(truth))
        return measure

    bound = tensor.tested.allowance
    if not isinstance(bound, Allowance):  # the user's tolerance
        return diagnose_computed(found, chunks)
    # no other dtype is multiplied in TF32
    in_tf32 = measure_in_tf32 if low_rank.adapter == torch.float32 else None
    diagnosis = diagnose_computed(found, chunks, in_tf32=in_tf32)
    figures = {"product": bound.product, "weight": bound.weight, "floor": bound.floor}
    recipe = {"scaling": low_rank.scaling, "safe": bool(tensor.safe), "allowance": figures}
    return replace(diagnosis, evidence={**diagnosis.evidence, "recipe": recipe})


def _ingredients(tensor: Computed, measure: Measure | None) -> dict[str, torch.Tensor | None]:
    """Return the tensors that `Recorder.computed` keeps beside one outside its rule: its factors, or its exact value.

    None are kept of a form's tensor that is too large, since its exact value would be made as a whole.
    """
    truth = tensor.truth
    if truth.form is not None:
        is_outside = measure is not None and measure.ratio is not None and not passes(measure.ratio)
        exact_bytes = 8 * tensor.actual.numel()
        if not is_outside or exact_bytes > KEEP_BYTES:
            return {}
        exact, allowed = whole(truth.form.chunks(tensor.by_form), tensor.actual.shape)
        bound = allowed if tensor.tolerance is None else None
        return {"exact": exact, "allowed": bound}
    if truth.low_rank is None:
        return {"exact": truth.exact}
    return {"left": truth.low_rank.left, "right": truth.low_rank.right, "base": truth.base}
