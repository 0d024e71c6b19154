"""Judge the combinations of several LoRAs by `add_weighted_adapter` against its definition in float64.

The types whose results users have reported as wrong have a closed form. `linear` adds the factors, each with the root
of its weight times its scaling; `cat` puts them side by side, weight and scaling in lora_A; `svd` adds the deltas and
cuts the decomposition of the sum (`cut`); `dare_linear` and `dare_ties` leave out elements of factors by chance
(`chance`). What an older PEFT computes otherwise than by these definitions is not judged.

`magnitude_prune` and `ties` leave out the smallest elements first: they are compared with PEFT's own functions in
float64 (`pruned`), where these choose the same elements. The other `_svd` types are compared between workers.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from consistency.capture.names import module_place
from consistency.capture.records import TensorRecord
from consistency.errors import first_line
from consistency.extras.peft_api.adapters.chance import BY_CHANCE, Draws, chosen, drawing, share_of_chance
from consistency.extras.peft_api.adapters.cut import Sample, check_cut, layers_to_cut, only_in
from consistency.extras.peft_api.adapters.layer_factors import LayerFactors, factors_of
from consistency.extras.peft_api.adapters.multi_adapter_model import STAGE, MultiAdapterModel
from consistency.extras.peft_api.adapters.pruned import DENSITY, PRUNED, by_peft, rounding_of, sum_of, undetermined
from consistency.extras.peft_api.adapters.spec import WRONG_DENSITY
from consistency.extras.peft_api.adapters.truncated import TRUNCATED
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import digest
from consistency.numerics.error import measure_against_exact
from consistency.numerics.rules import Rule, passes
from consistency.numerics.running_error import Arithmetic, Tracked
from consistency.worker.environment import release
from consistency.worker.judging.bound_rule import record_bounded
from consistency.worker.model.merging import adapted_layers
from consistency.worker.precision import products_of

TYPES = ("linear", "cat", *PRUNED, *BY_CHANCE, *TRUNCATED)
WITH_FORM = ("linear", "cat", *BY_CHANCE, "svd")
_STEP = "add_weighted_adapter"
_WITHOUT_DENSITY = ("linear", "cat", "svd")


def combine(multi_model: MultiAdapterModel) -> None:
    """Combine all adapters in each type, record the factors, and delete the combination."""
    if not hasattr(multi_model.model, "add_weighted_adapter"):
        method = multi_model.model.peft_config[multi_model.names[0]].peft_type.value
        multi_model.skipped(_STEP, "everything", f"PEFT has no add_weighted_adapter for {method}")
        return
    weights = [1 - 0.25 * number / len(multi_model.names) for number in range(len(multi_model.names))]
    sample = layers_to_cut(multi_model, weights)
    for done, kind in enumerate(TYPES):
        multi_model.context.events.step(f"{_STEP}, {kind}", done, len(TYPES))
        _combine_in_type(multi_model, kind, weights, sample)
    multi_model.check_bytes(_STEP)


def _combine_in_type(multi_model: MultiAdapterModel, kind: str, weights: list[float], sample: Sample) -> None:
    """Combine all adapters in one type; `sample` has the layers in which deltas are cut, for the types that cut."""
    step, name = f"{_STEP}({kind})", _unused_name(f"combined_{kind}", multi_model.names)
    paths = sample.paths if kind in TRUNCATED else None
    if paths is not None and not paths:
        multi_model.skipped(step, "everything", sample.reason)
        return
    density = None if kind in _WITHOUT_DENSITY else DENSITY
    try:
        with only_in(multi_model, paths), drawing() as draws:
            multi_model.model.add_weighted_adapter(
                list(multi_model.names), weights, name, combination_type=kind, density=density
            )
    except ValueError as error:  # ranks, target modules or modules saved whole that PEFT does not combine
        multi_model.refused(step, f"PEFT does not combine them: {first_line(error)}")
        return
    multi_model.done(step)
    _check_combination(multi_model, kind, name, weights, draws)
    if paths is not None and sample.reason:
        multi_model.skipped(step, "further layers", sample.reason)
    multi_model.model.delete_adapter(name)
    multi_model.check_deleted(step, name)
    multi_model.model.set_adapter(multi_model.names[0])


def _check_combination(
    multi_model: MultiAdapterModel, kind: str, name: str, weights: Sequence[float], draws: Draws
) -> None:
    """Record the factors of a combination in every layer, its scaling, and the share of elements that were kept."""
    scalings, reasons = set(), set()
    dealt = _DealtDraws(multi_model, f"{_STEP}({kind})", draws)
    for path, layer in adapted_layers(multi_model.model):
        if name in getattr(layer, "scaling", {}):
            scalings.add(float(layer.scaling[name]))
        for factors in factors_of(multi_model, path, layer, weights, combined=name):
            reason = _why_defined_otherwise(kind, factors.scalings)
            if reason:
                reasons.add(reason)
            # draws are taken for each layer, judged or not: the next layer's draws come after them
            masks = _take_masks(kind, dealt, factors)
            place = module_place(path)
            if reason or not multi_model.context.record.wants(STAGE, place):
                continue
            if kind in TRUNCATED:
                check_cut(multi_model, kind, place, factors, rank=multi_model.model.peft_config[name].r)
            elif kind not in BY_CHANCE or masks is not None:
                _check_factors(multi_model, kind, place, factors, masks)
    if "dare" in kind:
        dealt.record_density()
    for reason in sorted(reasons):
        multi_model.skipped(f"{_STEP}({kind})", "factors", reason)
    _check_scalings(multi_model, kind, scalings)


def _take_masks(kind: str, dealt: _DealtDraws, factors: LayerFactors) -> list[list[np.ndarray]] | None:
    """Return the elements that chance kept in the factors of a layer; None where the type draws nothing in them.

    Types that are cut draw in the deltas, before they are cut.
    """
    if kind in BY_CHANCE:
        return dealt.take([factors.a[0].shape, factors.b[0].shape], factors)
    if "dare" in kind:
        dealt.take([factors.delta_shape], factors)
    return None


def _check_scalings(multi_model: MultiAdapterModel, kind: str, scalings: set[float]) -> None:
    """Record whether the combination has the scaling 1 in every layer."""
    if scalings - {1.0}:
        # the factors hold weights and scalings already; rank-stabilized LoRA divides by the root of the rank alone
        multi_model.skipped(
            f"{_STEP}({kind})",
            "scaling",
            f"PEFT gives the combination the scaling {', '.join(f'{s:g}' for s in sorted(scalings))} although its "
            "factors contain it: it is not the weighted sum of the adapters",
        )
    else:
        multi_model.fact(f"{_STEP}({kind})", "scaling")


def _why_defined_otherwise(kind: str, scalings: Sequence[float]) -> str:
    """Return why the installed PEFT gives another combination than the definition; empty where it follows it."""
    version = importlib.metadata.version("peft")
    if kind in BY_CHANCE and release("peft") < (0, 19):
        return f"PEFT {version} does not divide the elements that it keeps by the density, which takes PEFT 0.19"
    if kind == "svd" and release("peft") < (0, 21) and any(scaling != 1 for scaling in scalings):
        return f"PEFT {version} multiplies a delta by its scaling twice; PEFT 0.21 multiplies once"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the two factors of a combination in one layer."""

    part: str
    actual: torch.Tensor
    files: tuple[np.ndarray, ...]
    """The factor in the files, one for each adapter."""
    roots: list[float]
    """The weight of each adapter in the factor: a root, as the deltas are products of two factors."""


class _DealtDraws:
    """The draws of one combination, dealt out to layers in PEFT's order, and how many elements they kept.

    PEFT draws layer by layer, for A and then B, for each adapter in turn. Draws of other shapes are another order.
    """

    def __init__(self, multi_model: MultiAdapterModel, step: str, draws: Draws) -> None:
        self._several, self._step = multi_model, step
        self._remaining = list(draws.kept)
        self._is_known = True
        self._kept = self._drawn = self._same = self._pairs = 0

    def take(self, shapes: Sequence[tuple[int, ...]], factors: LayerFactors) -> list[list[np.ndarray]] | None:
        """Return masks of the elements that were kept, for each shape and adapter; None where they are not known."""
        count = len(factors.names)
        masks_by_shape = []
        for shape in shapes:
            masks, self._remaining = self._remaining[:count], self._remaining[count:]
            self._is_known = self._is_known and [mask.numel() for mask in masks] == [math.prod(shape)] * count
            if not self._is_known:
                return None
            masks_by_shape.append([mask.reshape(shape).numpy() for mask in masks])
            self._kept += sum(int(mask.sum()) for mask in masks)
            self._drawn += sum(mask.numel() for mask in masks)
            if count > 1:
                self._same += int((masks[0] == masks[1]).sum())
                self._pairs += masks[0].numel()
        return masks_by_shape

    def record_density(self) -> None:
        """Record whether chance explains how many elements were kept, and how many in two adapters alike."""
        if not self._is_known or self._remaining:
            self._several.skipped(self._step, "values", "this PEFT draws what it leaves out in another order")
            return
        self._record_fraction(
            "density", self._kept, self._drawn, DENSITY, "{} of {} elements are kept, with a density of {:g}"
        )
        self._record_fraction(
            "independence",
            self._same,
            self._pairs,
            DENSITY**2 + (1 - DENSITY) ** 2,
            "{} of {} elements are kept or left out of two adapters alike; independent draws have a share of {:g}",
        )

    def _record_fraction(self, name: str, count: int, elements: int, probability: float, sentence: str) -> None:
        """Record whether chance explains a count of elements; `sentence` is formatted with count and elements."""
        ratio = share_of_chance(count, elements, probability)
        is_right = passes(ratio)
        if self._several.context.record.wants(STAGE, self._step):
            self._several.context.record.fact(
                STAGE,
                self._step,
                name,
                status="within" if is_right else "outside",
                ratio=ratio,
                word=None if is_right else WRONG_DENSITY,
                reason=None if is_right else sentence.format(count, elements, probability),
                evidence={"elements": elements, "kept": count, "probability": probability},
            )


def _check_factors(
    multi_model: MultiAdapterModel,
    kind: str,
    place: str,
    factors: LayerFactors,
    masks: Sequence[Sequence[np.ndarray]] | None,
) -> None:
    """Record both factors of a combination in one layer; `masks` has the elements that chance kept."""
    if kind in PRUNED:
        for side in _sides(factors):
            _check_by_float64(multi_model, kind, place, side, factors.dtype)
        return
    for side, exact in _exact_sides(kind, factors, masks):
        record_bounded(
            multi_model.context.record,
            STAGE,
            place,
            f"{kind}.{side.part}",
            actual=side.actual.to("cpu"),
            exact=exact,
            digests=[digest(side.actual)],
        )


def _check_by_float64(multi_model: MultiAdapterModel, kind: str, place: str, side: _Side, dtype: torch.dtype) -> None:
    """Record a factor against PEFT's own function in float64, where that chooses the same elements as a device."""
    record, actual, files = multi_model.context.record, side.actual, side.files
    row = TensorRecord(STAGE, place, f"{kind}.{side.part}", rule=Rule.PEER, status="measured")
    on_host = actual.to("cpu")
    reason = undetermined(kind, files)
    if reason:
        record.computed(msgspec.structs.replace(row, reason=reason), on_host, digests=[digest(actual)])
        return
    exact = by_peft(kind, files, side.roots, torch.float64)

    rounding = rounding_of(
        lambda: by_peft(kind, files, side.roots, dtype).to(on_host.dtype),
        exact,
        products_of(multi_model.context.device),
    )
    tolerance = record.tolerance(stage=STAGE, layer=place, dtype=on_host.dtype)
    record.computed(
        msgspec.structs.replace(row, rule=Rule.RELATIVE, rounding=rounding),
        on_host,
        digests=[digest(actual)],
        measure=measure_against_exact(on_host, exact, tolerance),
        tolerance=tolerance,
        chunks=None if tolerance is None else lambda: exact_chunks(on_host, exact, tolerance),
    )


def _sides(factors: LayerFactors) -> Iterator[_Side]:
    """Yield the two factors of a combination in one layer, A first."""
    scales = [weight * scaling for weight, scaling in zip(factors.weights, factors.scalings, strict=True)]
    part_a, part_b = factors.parts
    actual_a, actual_b = factors.combined
    yield _Side(part=part_a, actual=actual_a, files=factors.a, roots=_roots(scales, signed=True))
    yield _Side(part=part_b, actual=actual_b, files=factors.b, roots=_roots(scales, signed=False))


def _exact_sides(
    kind: str, factors: LayerFactors, masks: Sequence[Sequence[np.ndarray]] | None
) -> Iterator[tuple[_Side, Tracked]]:
    """Yield the two factors of one layer, each with its exact value."""
    for number, side in enumerate(_sides(factors)):
        by = Arithmetic.of(side.actual.dtype)
        if kind == "linear":
            yield side, sum_of(by, side.files, side.roots)
        elif masks is not None:
            yield side, chosen(kind, by, side.files, masks[number], side.roots)
        else:  # `cat`, which puts weight and scaling into A alone
            scales = list(zip(factors.weights, factors.scalings, strict=True)) if number == 0 else None
            yield side, _side_by_side(by, side.files, scales, side.actual.shape, side.actual.dtype, axis=number)


def _roots(scales: Sequence[float], *, signed: bool) -> list[float]:
    """Return the weight of each adapter in one factor, the root of its scale; the first factor carries the sign."""
    roots = [math.sqrt(abs(scale)) for scale in scales]
    if not signed:
        return roots
    return [math.copysign(root, scale) for root, scale in zip(roots, scales, strict=True)]


def _side_by_side(
    by: Arithmetic,
    files: Sequence[np.ndarray],
    scales: Sequence[tuple[float, float]] | None,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    axis: int,
) -> Tracked:
    """Return the factors one after the other, and zeros up to the shape that PEFT allocates, in its dtype.

    That may be narrower than the adapters' own: PEFT loads adapters in float32, and makes a combination in the dtype of
    the base. What is not scaled is rounded once, which has one result.
    """
    if scales is None:
        terms = [by.known(torch.from_numpy(tensor).to(dtype).to(torch.float64).numpy()) for tensor in files]
    else:
        terms = [
            ((by.known(tensor) * by.constant(weight)).store() * by.constant(scaling)).store()
            for tensor, (weight, scaling) in zip(files, scales, strict=True)
        ]
    size = sum(term.value.shape[axis] for term in terms)
    padding = [(0, 0)] * len(shape)
    padding[axis] = (0, shape[axis] - size)

    def join(arrays: list[np.ndarray]) -> np.ndarray:
        return np.pad(np.concatenate(arrays, axis=axis), padding)

    return Tracked(value=join([term.value for term in terms]), error=join([term.error for term in terms]), by=by)


def _unused_name(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name
