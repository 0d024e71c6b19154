"""Several adapters merged at once, one after the other, and ten times over, layer by layer.

A merge writes into a copy of one layer's weight (`worker/model/merging.py`), so besides the model there are a few
copies of the largest layer. Merged weights are compared with float64 by the bound that is derived for them. What ten
cycles of merge and unmerge leave of a weight is a figure: rounding moves it on every device, within a bound too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from consistency.capture.names import module_place
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.case.stage import Level
from consistency.extras.peft_api.adapters.multi_adapter_model import STAGE, MultiAdapterModel
from consistency.extras.peft_api.adapters.spec import DRIFT
from consistency.numerics.bound import Allowance, cycles_allowance, merged_in_turn_allowance
from consistency.numerics.chunks import LowRankProduct, LowRankTensor, low_rank_chunks
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.error import measure_against_exact, measure_low_rank
from consistency.numerics.measure import Measure
from consistency.numerics.rules import Rule, passes
from consistency.worker.model.low_rank import LowRank, allowance_of, low_rank_of
from consistency.worker.model.merging import (
    adapted_layers,
    has_quantized_weight,
    restored,
    taking,
    weight_name,
    weight_of,
)
from consistency.worker.recorder import KEEP_BYTES

CYCLES = 10
AT_ONCE, IN_TURN, MOVED = "merged_at_once", "merged_in_turn", "drift"
_MOST_ELEMENTS = 1 << 24
"""Elements of weights from which no further layer is merged ten times, but at level thorough: a second for each million
was measured, on two cores that others used too."""
_ELEMENTS = 1 << 20
"""Elements whose drift is measured at a time: some 8 MiB for each of a few float64 arrays."""


def merge(multi_model: MultiAdapterModel) -> None:
    """Merge the adapters into every layer that two of them change."""
    without_form = without_drift = quantized = cycled_elements = 0
    is_thorough = multi_model.context.job.case.level is Level.THOROUGH
    layers = list(adapted_layers(multi_model.model))
    for done, (path, layer) in enumerate(layers):
        place = module_place(path)
        multi_model.context.events.step(f"merge, {place}", done, len(layers))
        names = [name for name in multi_model.names if _changes_layer(multi_model, name, path)]
        if len(names) < 2 or not multi_model.context.record.wants(STAGE, place):
            continue
        factors = []
        for name in names:
            low_rank = low_rank_of(multi_model.context.device, path, layer, multi_model.expected[name], adapter=name)
            if low_rank is not None:
                factors.append(low_rank)
        if has_quantized_weight(layer):
            quantized += 1
            continue
        if len(factors) < len(names) or weight_of(layer).dtype not in UNIT_ROUNDOFF:
            without_form += 1
            continue
        is_cycled = is_thorough or cycled_elements < _MOST_ELEMENTS
        # half of the time of a merge is computing deltas, which are the same every time
        with torch.no_grad(), taking(layer, {name: layer.get_delta_weight(name) for name in names}):
            _merge_layer(multi_model, path, layer, names, factors)
            if is_cycled:
                cycled_elements += weight_of(layer).numel()
                _cycle(multi_model, path, layer, names, factors)
        without_drift += not is_cycled
    if without_drift:
        multi_model.skipped(
            "merge", MOVED, f"not measured in {without_drift} further layers: level thorough measures all"
        )
    if quantized:
        multi_model.skipped(
            "merge",
            "quantized weights",
            f"several adapters are not merged into the quantized weights of {quantized} layers, which each merge "
            "quantizes again; the stage merged checks that with the first adapter",
        )
    if without_form:
        multi_model.skipped("merge", "merged weights", f"no closed form of several adapters in {without_form} layers")
    multi_model.check_bytes("merge")


def _changes_layer(multi_model: MultiAdapterModel, adapter: str, path: str) -> bool:
    return any(parameter.startswith(f"{path}.") for parameter in multi_model.expected[adapter])


def _merge_layer(
    multi_model: MultiAdapterModel, path: str, layer: Any, names: Sequence[str], factors: Sequence[LowRank]
) -> None:
    """Merge the adapters into one layer, at once and one after the other, and record both merged weights."""
    place = module_place(path)
    before = multi_model.context.expected_under(path, f"base_layer.{weight_name(layer)}")
    if before is None:
        before = weight_of(layer).to("cpu")
    measures: dict[str, Measure] = {}
    merges = {AT_ONCE: [list(names)], IN_TURN: [[name] for name in names]}
    for tensor, merged_names in merges.items():
        with restored(layer):
            for adapter_names in merged_names:
                layer.merge(safe_merge=False, adapter_names=adapter_names)
            merged = weight_of(layer)
        _record_merged(multi_model, place, tensor, merged, before, factors, measures)
        del merged  # before the next merge makes another copy


def _cycle(
    multi_model: MultiAdapterModel, path: str, layer: Any, names: Sequence[str], factors: Sequence[LowRank]
) -> None:
    """Merge and unmerge the adapters of one layer ten times, and record how far its weight has moved."""
    with restored(layer):
        for _ in range(CYCLES):
            layer.merge(safe_merge=False, adapter_names=list(names))
            layer.unmerge()
        after = weight_of(layer).to("cpu")
    _record_drift(multi_model, module_place(path), after, weight_of(layer).to("cpu"), factors)


def _record_merged(
    multi_model: MultiAdapterModel,
    place: str,
    name: str,
    merged: torch.Tensor,
    before: torch.Tensor,
    factors: Sequence[LowRank],
    measures: dict[str, Measure],
) -> None:
    """Measure and record a merged weight.

    `measures` has this layer's measures by the digest of the weight, since equal bits have the same measure.
    """
    record, merged_digest = multi_model.context.record, digest(merged)
    tolerance = record.tolerance(stage=STAGE, layer=place, dtype=merged.dtype)
    roundings = 2 if any(low_rank.rounds_delta for low_rank in factors) else 1
    allowance = tolerance or merged_in_turn_allowance(
        [_delta_allowance(low_rank, merged) for low_rank in factors], weight=merged.dtype, roundings=roundings
    )
    product = _base_and_deltas(factors, before)
    tested = LowRankTensor(actual=merged.to("cpu"), allowance=allowance, has_base=True)
    if merged_digest.value not in measures:
        (measures[merged_digest.value],) = measure_low_rank([tested], product)
    measured = measures[merged_digest.value]
    ingredients: dict[str, torch.Tensor] = {}
    is_outside = measured.ratio is not None and not passes(float(measured.ratio))
    if is_outside and merged.nbytes <= KEEP_BYTES:
        exact, magnitude = _exact_merged(factors, before)
        ingredients = {"exact": exact}
        if isinstance(allowance, Allowance):
            ingredients["allowed"] = allowance.around(magnitude, before.to(torch.float64))
    record.computed(
        TensorRecord(STAGE, place, name, rule=Rule.BOUND, status="measured"),
        merged,
        digests=[merged_digest],
        measure=measured,
        tolerance=tolerance,
        chunks=lambda: low_rank_chunks(tested, product),
        ingredients=ingredients,
    )


def _exact_merged(factors: Sequence[LowRank], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact merged weight, and the sum of magnitudes in the product of each element."""
    left, right = _side_by_side(factors)
    return before.to(torch.float64) + left @ right, left.abs() @ right.abs()


def _side_by_side(factors: Sequence[LowRank]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of all deltas as two matrices, whose product is the scaled sum of the deltas."""
    left = torch.cat([low_rank.left.to(torch.float64) * low_rank.scaling for low_rank in factors], dim=1)
    right = torch.cat([low_rank.right.to(torch.float64) for low_rank in factors], dim=0)
    return left, right


def _delta_allowance(factors: LowRank, weight: torch.Tensor) -> Allowance:
    """Return the error that is allowed in a delta itself, before it is added."""
    allowance = allowance_of(factors, None, weight, roundings=0)
    assert isinstance(allowance, Allowance)  # without a user's tolerance
    return allowance


def _base_and_deltas(factors: Sequence[LowRank], before: torch.Tensor) -> LowRankProduct:
    """Return the base and all deltas as one product: the factors side by side."""
    left, right = _side_by_side(factors)
    return LowRankProduct(left=left, right=right, scaling=1.0, base=before)


def _record_drift(
    multi_model: MultiAdapterModel, place: str, after: torch.Tensor, before: torch.Tensor, factors: Sequence[LowRank]
) -> None:
    """Record how far cycles of merge and unmerge have moved a weight, against the rounding that they allow."""
    difference = measure(after, before)
    status: RecordStatus = "equal"
    ratio, word, reason = 0.0, None, None
    if difference.mismatched:
        deltas = [_delta_allowance(low_rank, after) for low_rank in factors]
        allowance = cycles_allowance(deltas, weight=after.dtype, cycles=CYCLES)
        status, ratio = "within", _drift_ratio(after, before, factors, allowance)
    if not passes(ratio):
        status, word = "outside", DRIFT
        reason = (
            f"{CYCLES} cycles of merge and unmerge move {place} by up to {difference.max_abs:g}, which rounding cannot"
        )
    multi_model.context.record.fact(
        STAGE,
        place,
        MOVED,
        status=status,
        ratio=ratio,
        word=word,
        reason=reason,
        evidence={
            "cycles": CYCLES,
            "adapters": len(factors),
            "max_abs": difference.max_abs,
            "max_ulp": difference.max_ulp,
            "elements_changed": difference.mismatched,
            "elements": difference.elements,
        },
    )


def _drift_ratio(after: torch.Tensor, before: torch.Tensor, factors: Sequence[LowRank], allowance: Allowance) -> float:
    """Return the largest ratio of drift and allowance of an element; infinite where it is NaN."""
    left = torch.cat([low_rank.left.to(torch.float64).abs() * abs(low_rank.scaling) for low_rank in factors], dim=1)
    right = torch.cat([low_rank.right.to(torch.float64).abs() for low_rank in factors], dim=0)
    worst = 0.0
    step = max(1, _ELEMENTS // max(1, after.shape[1]))
    for row in range(0, after.shape[0], step):
        rows = slice(row, row + step)
        exact = before[rows].to(torch.float64)
        allowed = allowance.around(left[rows] @ right, exact)
        ratio = measure_against_exact(after[rows].contiguous(), exact, allowed).ratio
        if ratio is None or math.isnan(ratio):
            return math.inf
        worst = max(worst, float(ratio))
    return worst
