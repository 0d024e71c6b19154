"""Stage `merged`: delta and merged weight of every adapted layer, through PEFT's own merge.

A LoRA merge is held against the derived bound, per element, with the exact value computed in float64 from the bytes
in the files. A method without a closed form is held against the same PEFT code run in float64 on the CPU. A tolerance
that the user gives replaces either rule, around the same exact values.

The model is left as it was found, to the bit: a layer is merged, looked at, unmerged, and its weight restored from a
copy, so beside the model there is one copy of one layer's weight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from consistency.capture.names import DELTA, SAFE_WEIGHT, WEIGHT, module_place
from consistency.capture.records import RecordStatus
from consistency.numerics.bound import Allowance, measure_against_exact, measure_low_rank
from consistency.numerics.diagnosis_computed import diagnose_computed, exact_chunks, low_rank_chunks
from consistency.numerics.diagnosis_moved import Diagnosis
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.distance import Measure
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.exact import Float64Mode
from consistency.numerics.rules import Rule, passes
from consistency.worker.memory.host_memory import is_out_of_memory
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.stages.context import Context
from consistency.worker.stages.merged.low_rank import LowRank, allowance_of, low_rank_of
from consistency.worker.stages.user_tolerance import Given

# what PEFT raises where it does not merge
NO_MERGE = (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a merged weight is held against: the factors of a LoRA and its base weight, or a merge in float64."""

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


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every layer that the adapter changes, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and hasattr(module, "merge") and hasattr(module, "get_base_layer"):
            yield name, module


@contextmanager
def merged(layer: Any, *, safe: bool) -> Iterator[torch.Tensor]:
    """Merge one layer by PEFT's own code, and restore its weights to the bit at the end.

    Yields
    ------
    torch.Tensor
        The merged weight.
    """
    with restored(layer):
        layer.merge(safe_merge=safe, adapter_names=[ADAPTER_NAME])
        yield weight_of(layer)


@contextmanager
def restored(layer: Any) -> Iterator[None]:
    """Unmerge one layer at the end, and restore its weights to the bit."""
    base = layer.get_base_layer()
    kept = [(p, p.data, p.detach().clone()) for p in base.parameters(recurse=False)]
    with torch.no_grad():
        try:
            yield
        finally:
            if layer.merged_adapters:
                layer.unmerge()
            for parameter, data, copied in kept:
                data.copy_(copied)
                parameter.data = data  # the storage it had, which a tied weight shares


def weight_of(layer: Any) -> torch.Tensor:
    """Return the weight that a merge changes: of the base layer, or the parameter that PEFT wraps by its name."""
    weight = layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def _look(context: Context, name: str, place: str, layer: Any) -> None:
    repeats = context.job.case.repeat
    low_rank = low_rank_of(context, name, layer)
    if hasattr(layer, "get_delta_weight"):
        _delta(context, place, layer, low_rank, repeats)
    derived = Rule.BOUND if low_rank else Rule.RELATIVE
    truth: Truth | None = None
    seen: tuple[TensorDigest, Measure | None, float | None] | None = None
    for safe in (False, True) if context.job.case.plan.safe_merge else (False,):
        tensor = SAFE_WEIGHT if safe else WEIGHT
        try:
            given = Given.of(context, stage="merged", layer=place, dtype=weight_of(layer).dtype)
            # before the merge: of a layer that is merged, PEFT merges no copy
            truth = truth or _truth(context, name, place, layer, low_rank)
            own = None if given else _own_error(context, name, layer, truth, safe=safe)
            with merged(layer, safe=safe) as weight:
                here = digest(weight)
                if seen is not None and seen[0].value == here.value:
                    found, error = seen[1], seen[2]  # the same bits have the same measure
                else:
                    found = _judge(weight, truth, given, safe=safe)
                    is_own_error = own is None and not (low_rank or given)
                    error = float(found.max_abs) if found is not None and is_own_error else own
                host = weight.to("cpu", copy=True) if _worth(found) or context.job.case.keep else weight
            again = [_digest_again(layer, safe=safe) for _ in range(repeats - 1)]
        except NO_MERGE as failure:
            if is_out_of_memory(failure):
                raise
            context.record.absent(
                stage="merged", layer=place, tensor=tensor, rule=derived, status="skipped",
                reason=f"PEFT does not merge this layer: {type(failure).__name__}: {failure}",
            )  # fmt: skip
            continue
        seen = (here, found, error)
        cause = _cause(found, given, host, truth, roundings=_roundings(truth, safe=safe))
        context.record.computed(
            stage="merged",
            layer=place,
            tensor=tensor,
            actual=host,
            rule=_rule(found, given, derived),
            found=found,
            status=_status(found),
            diagnosis=None if cause is None else cause.word,
            digests=[here, *again],
            reference_error=error,
            evidence={
                **_evidence(cause, given if found is not None else None),
                **_recipe(found, given, weight, truth, safe=safe),
            },
            keep=context.job.case.keep,
            exact=truth.exact,
            ingredients=_ingredients(truth),
        )


def _base_weight(context: Context, place: str, layer: Any) -> torch.Tensor:
    """Return the weight before the merge: the file's bytes, or the device's where no file holds it as it is."""
    known = context.expected_base(f"{place}.weight")
    return weight_of(layer).to("cpu", copy=True) if known is None else known


def _delta(context: Context, place: str, layer: Any, low_rank: LowRank | None, repeats: int) -> None:
    try:
        with torch.no_grad():
            delta = _delta_weight(layer)
            again = [digest(_delta_weight(layer)) for _ in range(repeats - 1)]
    except (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as failure:
        if is_out_of_memory(failure):
            raise
        context.record.absent(
            stage="merged", layer=place, tensor=DELTA, rule=Rule.BOUND, status="skipped",
            reason=f"PEFT gives no delta of this layer: {type(failure).__name__}: {failure}",
        )  # fmt: skip
        return
    found = None
    given = Given.of(context, stage="merged", layer=place, dtype=delta.dtype)
    if low_rank is not None and delta.shape == (low_rank.left.shape[0], low_rank.right.shape[1]):
        found = measure_low_rank(
            delta.to("cpu"),
            left=low_rank.left,
            right=low_rank.right,
            scaling=low_rank.scaling,
            base=None,
            allowance=allowance_of(low_rank, given, delta, roundings=0),
        )
    cause = _cause(found, given, delta, Truth(low_rank=low_rank), roundings=0)
    context.record.computed(
        stage="merged",
        layer=place,
        tensor=DELTA,
        actual=delta,
        rule=_rule(found, given, Rule.BOUND),
        found=found,
        status=_status(found) if found is not None else "skipped",
        diagnosis=None if cause is None else cause.word,
        digests=[digest(delta), *again],
        evidence={
            **_evidence(cause, given if found is not None else None),
            **_recipe(found, given, delta, Truth(low_rank=low_rank), safe=None),
        },
        keep=context.job.case.keep,
        ingredients=_ingredients(Truth(low_rank=low_rank)),
        reason=None if found is not None else "this method's delta has no closed form: its merged weight is judged",
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
    """Return what a layer's merged weight is held against; a safe merge is the same function in exact arithmetic.

    Nothing where the weight is quantized, for there is no number format to bound, or where PEFT does not merge a copy
    in float64: then the other workers are the reference.
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


def _judge(weight: torch.Tensor, truth: Truth, given: Given | None, *, safe: bool) -> Measure | None:
    """Measure a merged weight; None where there is no exact value of its shape."""
    if truth.low_rank is not None:
        return measure_low_rank(
            weight.to("cpu"),
            left=truth.low_rank.left,
            right=truth.low_rank.right,
            scaling=truth.low_rank.scaling,
            base=truth.base,
            allowance=allowance_of(truth.low_rank, given, weight, roundings=_roundings(truth, safe=safe)),
        )
    if truth.exact is None or truth.exact.shape != weight.shape:
        return None
    return measure_against_exact(weight.to("cpu"), truth.exact, given.allowance if given else None)


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


def _roundings(truth: Truth, *, safe: bool) -> int:
    return 2 if safe or (truth.low_rank is not None and truth.low_rank.rounds_delta) else 1


def _rule(found: Measure | None, given: Given | None, derived: Rule) -> Rule:
    """Return what judges a tensor: without an exact value neither a bound nor the user's tolerance can."""
    return Rule.PEER if found is None else Rule.USER if given else derived


def _cause(
    found: Measure | None, given: Given | None, tensor: torch.Tensor, truth: Truth, *, roundings: int
) -> Diagnosis | None:
    """Name the difference of a delta (`roundings` 0) or a merged weight from its exact value."""
    if found is None or found.bound_ratio is None:
        return None
    if passes(found.bound_ratio):
        # inside a tolerance that nobody derived there is nothing to say of its cause
        return None if given else diagnose_computed(found)
    host = tensor.to("cpu")
    low_rank = truth.low_rank
    if low_rank is None:
        assert truth.exact is not None  # a ratio without factors is one by the user's own tolerance
        assert given is not None
        exact = truth.exact
        return diagnose_computed(found, lambda: exact_chunks(host, exact, given.allowance))
    factors: dict[str, Any] = {"left": low_rank.left, "right": low_rank.right, "scaling": low_rank.scaling}
    factors["base"] = truth.base
    allowed = allowance_of(low_rank, given, tensor, roundings=roundings)
    in_tf32 = allowance_of(low_rank, None, tensor, roundings=roundings, tf32=True)
    return diagnose_computed(
        found,
        lambda: low_rank_chunks(host, **factors, allowance=allowed),
        in_tf32=(lambda: measure_low_rank(host, **factors, allowance=in_tf32))
        if low_rank.adapter == torch.float32 and given is None  # outside the float32 bound, not a user's
        else None,
    )


def _evidence(cause: Diagnosis | None, given: Given | None) -> dict[str, Any]:
    return {**(given.evidence if given else {}), **(cause.evidence if cause else {})}


def _ingredients(truth: Truth) -> dict[str, torch.Tensor]:
    """Return what a merge of a LoRA is made from, as the files have it."""
    if truth.low_rank is None:
        return {}
    factors = {"left": truth.low_rank.left, "right": truth.low_rank.right}
    return factors if truth.base is None else {**factors, "base": truth.base}


def _recipe(
    found: Measure | None, given: Given | None, tensor: torch.Tensor, truth: Truth, *, safe: bool | None
) -> dict[str, Any]:
    """Return how a merged weight, or a delta (`safe` None), that is outside its bound can be made and judged again."""
    if truth.low_rank is None or given is not None or not _worth(found):
        return {}
    roundings = 0 if safe is None else _roundings(truth, safe=safe)
    allowed = allowance_of(truth.low_rank, None, tensor, roundings=roundings)
    assert isinstance(allowed, Allowance)
    figures = {"product": allowed.product, "weight": allowed.weight, "floor": allowed.floor}
    return {"recipe": {"scaling": truth.low_rank.scaling, "safe": bool(safe), "allowance": figures}}


def _status(found: Measure | None) -> RecordStatus:
    if found is None or found.bound_ratio is None:
        return "measured"
    if float(found.max_abs) == 0 and found.mismatched == 0:
        return "equal"
    return "within" if passes(found.bound_ratio) else "outside"


def _worth(found: Measure | None) -> bool:
    return found is not None and found.bound_ratio is not None and not passes(found.bound_ratio)
