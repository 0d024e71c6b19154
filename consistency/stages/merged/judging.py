"""The tensors of a layer that a merge made: their measures against their exact values, and their records."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from consistency.capture.names import DELTA, SAFE_WEIGHT, WEIGHT
from consistency.capture.records import TensorRecord
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
        shape = None if self.exact is None else self.exact.shape
        return tensor.shape == (shape if self.low_rank is None else self.low_rank.shape)


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
        allowance = allowance_of(
            self.truth.low_rank, self.tolerance, self.actual, roundings=_roundings(self.truth, safe=self.safe)
        )
        return LowRankTensor(actual=self.actual.to("cpu"), allowance=allowance, has_base=self.safe is not None)

    @property
    def by_form(self) -> Judged:
        """The tensor on the CPU, where a form judges it."""
        return Judged(actual=self.actual.to("cpu"), safe=self.safe, tolerance=self.tolerance)


def judge(
    context: Context,
    place: str,
    computed: Sequence[Computed],
    known: dict[str, tuple[Measure | None, RoundingError | None]],
) -> None:
    """Measure and record tensors of one layer.

    `known` is filled with measure and error of rounding of each merged weight by its digest: the same bits have the
    same ones.
    """
    measures = _measured(computed, known)
    for one in computed:
        here = one.digests[0].value
        found, rounding = measures.get((one.safe, here)), one.rounding
        if one.safe is not None:
            found, rounding = known.setdefault(here, (found, rounding))
        lacks = f"the adapter's file has no {one.truth.lacks} of this layer" if one.truth.lacks else ""
        no_form = f"{lacks or 'this method has no closed form of the delta'}: its merged weight is judged"
        row = TensorRecord(
            "merged",
            place,
            DELTA if one.safe is None else SAFE_WEIGHT if one.safe else WEIGHT,
            rule=one.rule,
            status="skipped" if one.safe is None else "measured",
            reason=no_form if one.safe is None and found is None else None,
            rounding=rounding,
            effect="zero-delta" if one.safe is None and _is_zero(one.actual) else "",
        )
        context.record.computed(
            row,
            one.actual,
            digests=one.digests,
            found=found,
            chunks=functools.partial(_chunks, one),
            diagnose=functools.partial(_diagnose, one),
            tolerance=one.tolerance,
            ingredients=_stored(one, found),
        )


def _is_zero(delta: torch.Tensor) -> bool:
    """Return whether a delta is zero; a row of it tells that nearly always, without a pass over the rest."""
    return not delta[:1].any() and not delta.any()


def _measured(computed: Sequence[Computed], known: Collection[str]) -> dict[tuple[bool | None, str], Measure]:
    """Measure the tensors of one layer that have an exact value, but bits that are known, in one pass."""
    found: dict[tuple[bool | None, str], Measure] = {}
    low_rank: list[Computed] = []
    by_form: list[Computed] = []
    seen = set(known)
    for one in computed:
        here = one.digests[0].value
        if not one.truth.judges(one.actual, safe=one.safe) or (one.safe is not None and here in seen):
            continue
        if one.safe is not None:
            seen.add(here)
        if one.truth.form is not None:
            by_form.append(one)
        elif one.truth.exact is None:
            low_rank.append(one)
        else:
            found[one.safe, here] = measure_against_exact(one.actual.to("cpu"), one.truth.exact, one.tolerance)
    if low_rank:
        product = _product(max((one.truth for one in low_rank), key=lambda truth: truth.base is not None))
        measures = measure_low_rank([one.tested for one in low_rank], product)
        found |= {(one.safe, one.digests[0].value): measure for one, measure in zip(low_rank, measures, strict=True)}
    if by_form:
        form = by_form[0].truth.form
        assert form is not None
        measures = form.measure([one.by_form for one in by_form])
        found |= {(one.safe, one.digests[0].value): measure for one, measure in zip(by_form, measures, strict=True)}
    return found


def _roundings(truth: Truth, *, safe: bool | None) -> int:
    """Return how often a merge rounds to the weight's dtype; 0 for a delta (`safe` None)."""
    if safe is None:
        return 0
    return 2 if safe or (truth.low_rank is not None and truth.low_rank.rounds_delta) else 1


def _product(truth: Truth) -> LowRankProduct:
    low_rank = truth.low_rank
    assert low_rank is not None
    return LowRankProduct(left=low_rank.left, right=low_rank.right, scaling=low_rank.scaling, base=truth.base)


def _chunks(one: Computed) -> Iterator[Chunk]:
    truth = one.truth
    if truth.form is not None:
        return truth.form.chunks(one.by_form)
    if truth.low_rank is not None:
        return low_rank_chunks(one.tested, _product(truth))
    assert truth.exact is not None  # a ratio without factors is one by the user's own tolerance
    assert one.tolerance is not None
    return exact_chunks(one.actual.to("cpu"), truth.exact, one.tolerance)


def _diagnose(one: Computed, found: Measure, chunks: Chunks) -> Diagnosis:
    """Name what is outside its rule, by its measure as if the products had run in TF32 too, and how it is judged."""
    truth, low_rank = one.truth, one.truth.low_rank
    if low_rank is None or truth.form is not None:
        return diagnose_computed(found, chunks)

    def in_tf32() -> Measure:
        roundings = _roundings(truth, safe=one.safe)
        allowed = allowance_of(low_rank, None, one.actual, roundings=roundings, tf32=True)
        (found,) = measure_low_rank([replace(one.tested, allowance=allowed)], _product(truth))
        return found

    allowed = one.tested.allowance
    if not isinstance(allowed, Allowance):  # the user's tolerance
        return diagnose_computed(found, chunks)
    cause = diagnose_computed(found, chunks, in_tf32=in_tf32 if low_rank.adapter == torch.float32 else None)
    figures = {"product": allowed.product, "weight": allowed.weight, "floor": allowed.floor}
    recipe = {"scaling": low_rank.scaling, "safe": bool(one.safe), "allowance": figures}
    return replace(cause, evidence={**cause.evidence, "recipe": recipe})


def _stored(one: Computed, found: Measure | None) -> dict[str, torch.Tensor | None]:
    """Return what `Recorder.computed` keeps of a tensor outside its rule: what it is made from, or its exact value."""
    truth = one.truth
    if truth.form is not None:
        fails = found is not None and found.ratio is not None and not passes(found.ratio)
        if not fails or 8 * one.actual.numel() > KEEP_BYTES:
            return {}
        exact, allowed = whole(truth.form.chunks(one.by_form), one.actual.shape)
        return {"exact": exact, "allowed": None if one.tolerance is not None else allowed}
    if truth.low_rank is None:
        return {"exact": truth.exact}
    return {"left": truth.low_rank.left, "right": truth.low_rank.right, "base": truth.base}
