"""Stage `merged`: delta and merged weight of every adapted layer, through PEFT's own merge.

A LoRA merge is compared per element, by the derived bound, with the exact value computed in float64 from the bytes in
the files. A method without a closed form is compared with the same PEFT code run in float64 on the CPU. A user's
tolerance replaces either rule, around the same exact values.

The model is left as it was, to the bit: a layer is merged into a copy of its weight (`worker/model/merging.py`), so
besides the model there are a few copies of one layer's weight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from consistency.capture.names import DELTA, SAFE_WEIGHT, WEIGHT, module_place
from consistency.errors import first_line
from consistency.numerics.bound import Allowance
from consistency.numerics.chunks import Chunk, exact_chunks, low_rank_chunks
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.error import measure_against_exact, measure_chunks
from consistency.numerics.exact import Float64Mode
from consistency.numerics.measure import Measure
from consistency.numerics.rules import Rule, passes
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import NO_MERGE, adapted_layers, merged, weight_of
from consistency.worker.out_of_memory import is_out_of_memory
from consistency.worker.recorder import UserTolerance
from consistency.worker.stages.context import Context
from consistency.worker.stages.merged.low_rank import LowRank, allowance_of, low_rank_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The reference of a merged weight: the factors of a LoRA and its base weight, or a merge in float64."""

    low_rank: LowRank | None = None
    base: torch.Tensor | None = None
    exact: torch.Tensor | None = None


def run(context: Context) -> None:
    """Record delta, merged weight and, where the level asks, safely merged weight of every adapted layer."""
    layers = list(adapted_layers(context.model))
    for done, (name, layer) in enumerate(layers):
        place = module_place(name)
        if not context.record.wants("merged", place):
            continue
        context.events.step(place, done, len(layers))
        _look(context, name, place, layer)


def _look(context: Context, name: str, place: str, layer: Any) -> None:
    record, repeats = context.record, context.job.case.repeat
    low_rank = low_rank_of(context, name, layer)
    if hasattr(layer, "get_delta_weight"):
        _delta(context, place, layer, low_rank, repeats)
    derived = Rule.BOUND if low_rank else Rule.RELATIVE
    truth: Truth | None = None
    seen: tuple[TensorDigest, Measure | None, float | None] | None = None
    for safe in (False, True) if context.job.case.plan.safe_merge else (False,):
        tensor = SAFE_WEIGHT if safe else WEIGHT
        try:
            tolerance = record.tolerance(stage="merged", layer=place, dtype=weight_of(layer).dtype)
            # before the merge: of a layer that is merged, PEFT merges no copy
            truth = truth or _truth(context, name, place, layer, low_rank)
            own = None if tolerance else _own_error(context, name, layer, truth, safe=safe)
            with merged(layer, safe=safe) as weight:
                here = digest(weight)
                if seen is not None and seen[0].value == here.value:
                    found, error = seen[1], seen[2]  # the same bits have the same measure
                else:
                    found = _judge(weight, truth, tolerance, safe=safe)
                    is_own_error = own is None and not (low_rank or tolerance)
                    error = float(found.max_abs) if found is not None and is_own_error else own
                exceeds = found is not None and found.bound_ratio is not None and not passes(found.bound_ratio)
                host = weight.to("cpu", copy=True) if exceeds or context.job.case.keep else weight
            again = [_digest_again(layer, safe=safe) for _ in range(repeats - 1)]
        except NO_MERGE as failure:
            if is_out_of_memory(failure):
                raise
            record.absent(
                "merged", place, tensor, rule=derived, status="skipped",
                reason=f"PEFT does not merge this layer: {first_line(failure)}",
            )  # fmt: skip
            continue
        seen = (here, found, error)
        record.computed(
            "merged",
            place,
            tensor,
            actual=host,
            digests=[here, *again],
            found=found,
            rule=derived,
            tolerance=tolerance,
            reference_error=error,
            exact=truth.exact,
            ingredients=_ingredients(truth),
            **_outside(host, truth, tolerance, safe=safe),
        )


def _base_weight(context: Context, place: str, layer: Any) -> torch.Tensor:
    """Return the weight before the merge: the file's bytes, or the device's where no file holds it unchanged."""
    known = context.expected_base(f"{place}.weight")
    return weight_of(layer).to("cpu", copy=True) if known is None else known


def _delta(context: Context, place: str, layer: Any, low_rank: LowRank | None, repeats: int) -> None:
    try:
        with torch.no_grad():
            delta = _delta_weight(layer)
            again = [digest(_delta_weight(layer)) for _ in range(repeats - 1)]
    except (*NO_MERGE, KeyError) as failure:
        if is_out_of_memory(failure):
            raise
        context.record.absent(
            "merged", place, DELTA, rule=Rule.BOUND, status="skipped",
            reason=f"PEFT gives no delta of this layer: {first_line(failure)}",
        )  # fmt: skip
        return
    found, truth = None, Truth(low_rank=low_rank)
    tolerance = context.record.tolerance(stage="merged", layer=place, dtype=delta.dtype)
    if low_rank is not None and delta.shape == (low_rank.left.shape[0], low_rank.right.shape[1]):
        found = _judge(delta, truth, tolerance, safe=None)
    context.record.computed(
        "merged",
        place,
        DELTA,
        actual=delta,
        digests=[digest(delta), *again],
        found=found,
        rule=Rule.BOUND,
        tolerance=tolerance,
        status="skipped",
        reason=None if found is not None else "this method's delta has no closed form: its merged weight is judged",
        ingredients=_ingredients(truth),
        **_outside(delta, truth, tolerance, safe=None),
    )


def _delta_weight(layer: Any) -> torch.Tensor:
    delta = layer.get_delta_weight(ADAPTER_NAME)
    if not isinstance(delta, torch.Tensor):  # BOFT: the rotations that make it
        raise TypeError(f"get_delta_weight gives a {type(delta).__name__}, not a tensor")
    return delta if delta.layout is torch.strided else delta.to_dense()  # SHiRA's is sparse


def _digest_again(layer: Any, *, safe: bool) -> TensorDigest:
    with merged(layer, safe=safe) as weight:
        return digest(weight)


def _truth(context: Context, name: str, place: str, layer: Any, low_rank: LowRank | None) -> Truth:
    """Return the reference of a layer's merged weight; a safe merge is the same function in exact arithmetic.

    Empty where the weight is quantized, for there is no number format to bound, or where PEFT does not merge a copy in
    float64: then the other workers are the reference.
    """
    if weight_of(layer).dtype not in UNIT_ROUNDOFF:
        return Truth()
    if low_rank is not None:
        return Truth(low_rank=low_rank, base=_base_weight(context, place, layer))
    try:
        twin = _copy_from_files(context, name, layer).double()
        with Float64Mode():
            return Truth(exact=_merge_copy(twin, safe=False))
    except NO_MERGE as failure:
        if is_out_of_memory(failure):
            raise
        return Truth()


def _own_error(context: Context, name: str, layer: Any, truth: Truth, *, safe: bool) -> float | None:
    """Return the CPU's own error where a layer of another device has no closed form."""
    if truth.exact is None or weight_of(layer).device.type == "cpu":
        return None
    own = _merge_copy(_copy_from_files(context, name, layer), safe=safe)
    return float(measure_against_exact(own, truth.exact).max_abs) if own.shape == truth.exact.shape else None


def _judge(weight: torch.Tensor, truth: Truth, tolerance: UserTolerance | None, *, safe: bool | None) -> Measure | None:
    """Measure a merged weight, or a delta (`safe` None); None where there is no exact value of its shape."""
    if truth.low_rank is not None:
        allowance = allowance_of(truth.low_rank, tolerance, weight, roundings=_roundings(truth, safe=safe))
        return measure_chunks(weight, low_rank_chunks(weight.to("cpu"), **_factors(truth), allowance=allowance))
    if truth.exact is None or truth.exact.shape != weight.shape:
        return None
    return measure_against_exact(weight.to("cpu"), truth.exact, tolerance)


def _copy_from_files(context: Context, name: str, layer: Any) -> Any:
    """Copy one layer to the CPU and give it the bytes in the files, so that no fault of the device is in it."""
    twin = copy.deepcopy(layer).to("cpu")
    with torch.no_grad():
        for part, parameter in (*twin.named_parameters(), *twin.named_buffers()):
            if f"{name}.{part}" in context.expected:
                parameter.copy_(context.expected[f"{name}.{part}"][1])
            elif part.startswith("base_layer."):
                base_name = f"{module_place(name)}.{part.removeprefix('base_layer.')}"
                known = context.expected_base(base_name)
                if known is not None:
                    parameter.copy_(known)
    return twin


def _merge_copy(twin: Any, *, safe: bool) -> torch.Tensor:
    with torch.no_grad():
        twin.merge(safe_merge=safe, adapter_names=[ADAPTER_NAME])
        return weight_of(twin)


def _roundings(truth: Truth, *, safe: bool | None) -> int:
    """Return how often a merge rounds to the weight's dtype; 0 for a delta (`safe` None)."""
    if safe is None:
        return 0
    return 2 if safe or (truth.low_rank is not None and truth.low_rank.rounds_delta) else 1


def _factors(truth: Truth) -> dict[str, Any]:
    assert truth.low_rank is not None
    low_rank = truth.low_rank
    return {"left": low_rank.left, "right": low_rank.right, "scaling": low_rank.scaling, "base": truth.base}


def _outside(
    tensor: torch.Tensor, truth: Truth, tolerance: UserTolerance | None, *, safe: bool | None
) -> dict[str, Any]:
    """Return what `Recorder.judged` asks for where a merged weight, or a delta (`safe` None), is outside its rule.

    That is its chunks, its measure as if the products had run in TF32, and how it can be made and judged again.
    """
    low_rank, roundings = truth.low_rank, _roundings(truth, safe=safe)
    if low_rank is None:

        def exact() -> Iterator[Chunk]:
            assert truth.exact is not None  # a ratio without factors is one by the user's own tolerance
            assert tolerance is not None
            return exact_chunks(tensor.to("cpu"), truth.exact, tolerance)

        return {"chunks": exact}
    allowed = allowance_of(low_rank, tolerance, tensor, roundings=roundings)
    in_tf32 = allowance_of(low_rank, None, tensor, roundings=roundings, tf32=True)

    def recipe() -> dict[str, Any]:
        if not isinstance(allowed, Allowance):
            return {}
        figures = {"product": allowed.product, "weight": allowed.weight, "floor": allowed.floor}
        return {"recipe": {"scaling": low_rank.scaling, "safe": bool(safe), "allowance": figures}}

    return {
        "chunks": lambda: low_rank_chunks(tensor.to("cpu"), **_factors(truth), allowance=allowed),
        "in_tf32": (
            lambda: measure_chunks(tensor, low_rank_chunks(tensor.to("cpu"), **_factors(truth), allowance=in_tf32))
        )
        if low_rank.adapter == torch.float32
        else None,
        "outside": recipe,
    }


def _ingredients(truth: Truth) -> dict[str, torch.Tensor]:
    """Return what a merge of a LoRA is made from, as the files have it."""
    if truth.low_rank is None:
        return {}
    factors = {"left": truth.low_rank.left, "right": truth.low_rank.right}
    return factors if truth.base is None else {**factors, "base": truth.base}
