"""Several adapters merged at once, one after the other, and ten times over, layer by layer.

A merge writes into a copy of one layer's weight (`worker/model/merging.py`), so besides the model there are a few
copies of the largest layer. Merged weights are compared with float64 by the bound that is derived for them. What ten
cycles of merge and unmerge leave of a weight is a figure: rounding moves it on every device, within a bound too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from consistency.capture.names import module_place
from consistency.capture.records import TensorRecord
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


def merge(several: MultiAdapterModel) -> None:
    """Merge the adapters into every layer that two of them change."""
    without_form = without_drift = quantized = elements = 0
    every = several.context.job.case.level is Level.THOROUGH
    layers = list(adapted_layers(several.model))
    for done, (path, layer) in enumerate(layers):
        place = module_place(path)
        several.context.events.step(f"merge, {place}", done, len(layers))
        names = [name for name in several.names if any(p.startswith(f"{path}.") for p in several.expected[name])]
        if len(names) < 2 or not several.context.record.wants(STAGE, place):
            continue
        found = [
            low_rank_of(several.context.device, path, layer, several.expected[name], adapter=name) for name in names
        ]
        factors = [one for one in found if one is not None]
        if has_quantized_weight(layer):
            quantized += 1
            continue
        if len(factors) < len(names) or weight_of(layer).dtype not in UNIT_ROUNDOFF:
            without_form += 1
            continue
        drifts = every or elements < _MOST_ELEMENTS
        # half of the time of a merge is computing deltas, which are the same every time
        with torch.no_grad(), taking(layer, {name: layer.get_delta_weight(name) for name in names}):
            _merge(several, path, layer, names, factors)
            if drifts:
                elements += weight_of(layer).numel()
                _cycle(several, path, layer, names, factors)
        without_drift += not drifts
    if without_drift:
        several.skipped("merge", MOVED, f"not measured in {without_drift} further layers: level thorough measures all")
    if quantized:
        several.skipped(
            "merge",
            "quantized weights",
            f"several adapters are not merged into the quantized weights of {quantized} layers, which each merge "
            "quantizes again; the stage merged checks that with the first adapter",
        )
    if without_form:
        several.skipped("merge", "merged weights", f"no closed form of several adapters in {without_form} layers")
    several.check_bytes("merge")


def _merge(several: MultiAdapterModel, path: str, layer: Any, names: Sequence[str], factors: Sequence[LowRank]) -> None:
    place = module_place(path)
    before = several.context.expected_under(path, f"base_layer.{weight_name(layer)}")
    before = weight_of(layer).to("cpu") if before is None else before
    known: dict[str, Measure] = {}
    for tensor in (AT_ONCE, IN_TURN):
        with restored(layer):
            for chosen in [names] if tensor == AT_ONCE else [[name] for name in names]:
                layer.merge(safe_merge=False, adapter_names=list(chosen))
            merged = weight_of(layer)
        _record(several, place, tensor, merged, before, factors, known)
        del merged


def _cycle(several: MultiAdapterModel, path: str, layer: Any, names: Sequence[str], factors: Sequence[LowRank]) -> None:
    with restored(layer):
        for _ in range(CYCLES):
            layer.merge(safe_merge=False, adapter_names=list(names))
            layer.unmerge()
        after = weight_of(layer).to("cpu")
    _record_drift(several, module_place(path), after, weight_of(layer).to("cpu"), factors)


def _record(
    several: MultiAdapterModel,
    place: str,
    name: str,
    merged: torch.Tensor,
    before: torch.Tensor,
    factors: Sequence[LowRank],
    known: dict[str, Measure],
) -> None:
    """Measure and record a merged weight; `known` has this layer's measures by digest, for equal bits have the same."""
    record, here = several.context.record, digest(merged)
    tolerance = record.tolerance(stage=STAGE, layer=place, dtype=merged.dtype)
    roundings = 2 if any(one.rounds_delta for one in factors) else 1
    allowance = tolerance or merged_in_turn_allowance(
        [_delta(one, merged) for one in factors], weight=merged.dtype, roundings=roundings
    )
    product = _together(factors, before)
    tested = LowRankTensor(actual=merged.to("cpu"), allowance=allowance, has_base=True)
    if here.value not in known:
        (known[here.value],) = measure_low_rank([tested], product)
    found = known[here.value]
    kept: dict[str, torch.Tensor] = {}
    if found.ratio is not None and not passes(float(found.ratio)) and merged.nbytes <= KEEP_BYTES:
        exact, size = _exact(factors, before)
        kept = {"exact": exact}
        if isinstance(allowance, Allowance):
            kept["allowed"] = allowance.around(size, before.to(torch.float64))
    record.computed(
        TensorRecord(STAGE, place, name, rule=Rule.BOUND, status="measured"),
        merged,
        digests=[here],
        found=found,
        tolerance=tolerance,
        chunks=lambda: low_rank_chunks(tested, product),
        ingredients=kept,
    )


def _exact(factors: Sequence[LowRank], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact merged weight, and the sum of magnitudes in the product of each element."""
    left = torch.cat([one.left.to(torch.float64) * one.scaling for one in factors], dim=1)
    right = torch.cat([one.right.to(torch.float64) for one in factors], dim=0)
    return before.to(torch.float64) + left @ right, left.abs() @ right.abs()


def _delta(factors: LowRank, weight: torch.Tensor) -> Allowance:
    found = allowance_of(factors, None, weight, roundings=0)
    assert isinstance(found, Allowance)  # without a user's tolerance
    return found


def _together(factors: Sequence[LowRank], before: torch.Tensor) -> LowRankProduct:
    """Return the base and all deltas as one product: the factors side by side."""
    left = torch.cat([one.left.to(torch.float64) * one.scaling for one in factors], dim=1)
    right = torch.cat([one.right.to(torch.float64) for one in factors], dim=0)
    return LowRankProduct(left=left, right=right, scaling=1.0, base=before)


def _record_drift(
    several: MultiAdapterModel, place: str, after: torch.Tensor, before: torch.Tensor, factors: Sequence[LowRank]
) -> None:
    found = measure(after, before)
    allowance = cycles_allowance([_delta(one, after) for one in factors], weight=after.dtype, cycles=CYCLES)
    share = _share(after, before, factors, allowance) if found.mismatched else 0.0
    moved = not passes(share)
    reason = f"{CYCLES} cycles of merge and unmerge move {place} by up to {found.max_abs:g}, which rounding cannot"
    several.context.record.fact(
        STAGE,
        place,
        MOVED,
        status="outside" if moved else "within" if found.mismatched else "equal",
        share=share,
        word=DRIFT if moved else None,
        reason=reason if moved else None,
        evidence={
            "cycles": CYCLES,
            "adapters": len(factors),
            "max_abs": found.max_abs,
            "max_ulp": found.max_ulp,
            "elements_changed": found.mismatched,
            "elements": found.elements,
        },
    )


def _share(after: torch.Tensor, before: torch.Tensor, factors: Sequence[LowRank], allowance: Allowance) -> float:
    """Return the largest drift over what is allowed for that element."""
    left = torch.cat([one.left.to(torch.float64).abs() * abs(one.scaling) for one in factors], dim=1)
    right = torch.cat([one.right.to(torch.float64).abs() for one in factors], dim=0)
    worst = 0.0
    step = max(1, _ELEMENTS // max(1, after.shape[1]))
    for row in range(0, after.shape[0], step):
        part = slice(row, row + step)
        exact = before[part].to(torch.float64)
        allowed = allowance.around(left[part] @ right, exact)
        share = measure_against_exact(after[part].contiguous(), exact, allowed).ratio
        worst = max(worst, float("inf") if share is None or share != share else float(share))
    return worst
