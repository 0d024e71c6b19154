"""What `add_weighted_adapter` makes of the factors of several LoRAs, against its definition in float64.

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
from consistency.extras.peft_api.adapters.cut import check_cut, layers_to_cut, only_in
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


def combine(several: MultiAdapterModel) -> None:
    """Combine all adapters in each type, record the factors, and delete the combination."""
    if not hasattr(several.model, "add_weighted_adapter"):
        method = several.model.peft_config[several.names[0]].peft_type.value
        several.skipped(_STEP, "everything", f"PEFT has no add_weighted_adapter for {method}")
        return
    weights = [1 - 0.25 * number / len(several.names) for number in range(len(several.names))]
    sample = layers_to_cut(several, weights)
    for done, kind in enumerate(TYPES):
        several.context.events.step(f"{_STEP}, {kind}", done, len(TYPES))
        step, name = f"{_STEP}({kind})", _unused(f"combined_{kind}", several.names)
        paths = sample.paths if kind in TRUNCATED else None
        if paths is not None and not paths:
            several.skipped(step, "everything", sample.reason)
            continue
        try:
            with only_in(several, paths), drawing() as draws:
                several.model.add_weighted_adapter(
                    list(several.names),
                    weights,
                    name,
                    combination_type=kind,
                    density=None if kind in _WITHOUT_DENSITY else DENSITY,
                )
        except ValueError as error:  # ranks, target modules or modules saved whole that PEFT does not combine
            several.refused(step, f"PEFT does not combine them: {first_line(error)}")
            continue
        several.done(step)
        _check(several, kind, name, weights, draws)
        if paths is not None and sample.reason:
            several.skipped(step, "further layers", sample.reason)
        several.model.delete_adapter(name)
        several.check_deleted(step, name)
        several.model.set_adapter(several.names[0])
    several.check_bytes(_STEP)


def _check(several: MultiAdapterModel, kind: str, name: str, weights: Sequence[float], draws: Draws) -> None:
    scalings, not_judged = set(), set()
    by_chance = _Chance(several, f"{_STEP}({kind})", draws)
    for path, layer in adapted_layers(several.model):
        if name in getattr(layer, "scaling", {}):
            scalings.add(float(layer.scaling[name]))
        place = module_place(path)
        for factors in factors_of(several, path, layer, weights, combined=name):
            otherwise = _computed_otherwise(kind, factors.scalings)
            if otherwise:
                not_judged.add(otherwise)
            if kind in TRUNCATED:
                if "dare" in kind:
                    by_chance.take([factors.delta_shape], factors)
                if not otherwise and several.context.record.wants(STAGE, place):
                    check_cut(several, kind, place, factors, rank=several.model.peft_config[name].r)
                continue
            masks = by_chance.take([factors.a[0].shape, factors.b[0].shape], factors) if kind in BY_CHANCE else None
            if otherwise or (kind in BY_CHANCE and masks is None):
                continue
            if several.context.record.wants(STAGE, place):
                _check_factors(several, kind, place, factors, masks)
    by_chance.done(expected="dare" in kind)
    for reason in sorted(not_judged):
        several.skipped(f"{_STEP}({kind})", "factors", reason)
    if scalings - {1.0}:
        # the factors hold weights and scalings already; rank-stabilized LoRA divides by the root of the rank alone
        several.skipped(
            f"{_STEP}({kind})",
            "scaling",
            f"PEFT gives the combination the scaling {', '.join(f'{s:g}' for s in sorted(scalings))} although its "
            "factors contain it: it is not the weighted sum of the adapters",
        )
    else:
        several.fact(f"{_STEP}({kind})", "scaling")


def _computed_otherwise(kind: str, scalings: Sequence[float]) -> str:
    """Say why the installed PEFT gives another combination than the definition's; empty where it gives that."""
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
    """What the adapters' files have of it, one for each adapter."""
    roots: list[float]
    """The share of each adapter in it."""


class _Chance:
    """The draws of one combination, dealt out to layers in PEFT's order, and how many elements they kept.

    PEFT draws layer by layer, for A and then B, for each adapter in turn. Draws of other shapes are another order.
    """

    def __init__(self, several: MultiAdapterModel, step: str, draws: Draws) -> None:
        self._several, self._step = several, step
        self._left = list(draws.kept)
        self._is_known = True
        self._kept = self._drawn = self._same = self._pairs = 0

    def take(self, shapes: Sequence[tuple[int, ...]], factors: LayerFactors) -> list[list[np.ndarray]] | None:
        """Return what was kept of the tensors of these shapes, for each adapter; None where it is not known."""
        count, found = len(factors.names), []
        for shape in shapes:
            here, self._left = self._left[:count], self._left[count:]
            self._is_known = self._is_known and [mask.numel() for mask in here] == [math.prod(shape)] * count
            if not self._is_known:
                return None
            found.append([mask.reshape(shape).numpy() for mask in here])
            self._kept += sum(int(mask.sum()) for mask in here)
            self._drawn += sum(mask.numel() for mask in here)
            if count > 1:
                self._same += int((here[0] == here[1]).sum())
                self._pairs += here[0].numel()
        return found

    def done(self, *, expected: bool) -> None:
        """Record whether the share of the elements that were kept is one that chance explains."""
        if not expected:
            return
        if not self._is_known or self._left:
            self._several.skipped(self._step, "values", "this PEFT draws what it leaves out in another order")
            return
        for what, kept, drawn, wanted, sentence in (
            ("density", self._kept, self._drawn, DENSITY, "{} of {} elements are kept, with a density of {:g}"),
            (
                "independence",
                self._same,
                self._pairs,
                DENSITY**2 + (1 - DENSITY) ** 2,
                "{} of {} elements are kept or left out of two adapters alike; independent draws have a share of {:g}",
            ),
        ):
            share = share_of_chance(kept, drawn, wanted)
            right = passes(share)
            if self._several.context.record.wants(STAGE, self._step):
                self._several.context.record.fact(
                    STAGE,
                    self._step,
                    what,
                    status="within" if right else "outside",
                    share=share,
                    word=None if right else WRONG_DENSITY,
                    reason=None if right else sentence.format(kept, drawn, wanted),
                    evidence={"elements": drawn, "kept": kept, "probability": wanted},
                )


def _check_factors(
    several: MultiAdapterModel,
    kind: str,
    place: str,
    factors: LayerFactors,
    masks: Sequence[Sequence[np.ndarray]] | None,
) -> None:
    record = several.context.record
    if kind in PRUNED:
        for side in _sides(factors):
            _check_by_float64(several, kind, place, side, factors.dtype)
        return
    for part, actual, exact in _exact(kind, factors, masks):
        record_bounded(
            record, STAGE, place, f"{kind}.{part}", actual=actual.to("cpu"), exact=exact, digests=[digest(actual)]
        )


def _check_by_float64(several: MultiAdapterModel, kind: str, place: str, side: _Side, dtype: torch.dtype) -> None:
    """Record a factor against PEFT's own function in float64, where that chooses the same elements as a device."""
    record, actual, files = several.context.record, side.actual, side.files
    row = TensorRecord(STAGE, place, f"{kind}.{side.part}", rule=Rule.PEER, status="measured")
    held = actual.to("cpu")
    reason = undetermined(kind, files)
    if reason:
        record.computed(msgspec.structs.replace(row, reason=reason), held, digests=[digest(actual)])
        return
    exact = by_peft(kind, files, side.roots, torch.float64)

    rounding = rounding_of(
        lambda: by_peft(kind, files, side.roots, dtype).to(held.dtype), exact, products_of(several.context.device)
    )
    tolerance = record.tolerance(stage=STAGE, layer=place, dtype=held.dtype)
    record.computed(
        msgspec.structs.replace(row, rule=Rule.RELATIVE, rounding=rounding),
        held,
        digests=[digest(actual)],
        found=measure_against_exact(held, exact, tolerance),
        tolerance=tolerance,
        chunks=None if tolerance is None else lambda: exact_chunks(held, exact, tolerance),
    )


def _sides(factors: LayerFactors) -> Iterator[_Side]:
    """Yield the two factors of a combination in one layer, A first."""
    scales = [weight * scaling for weight, scaling in zip(factors.weights, factors.scalings, strict=True)]
    for number, (part, actual, files) in enumerate(
        zip(factors.parts, factors.combined, (factors.a, factors.b), strict=True)
    ):
        yield _Side(part=part, actual=actual, files=files, roots=_roots(scales, signed=number == 0))


def _exact(
    kind: str, factors: LayerFactors, masks: Sequence[Sequence[np.ndarray]] | None
) -> Iterator[tuple[str, torch.Tensor, Tracked]]:
    """Yield name, actual and exact value of the factors of one layer."""
    for number, side in enumerate(_sides(factors)):
        actual, by = side.actual, Arithmetic.of(side.actual.dtype)
        if kind == "linear":
            yield side.part, actual, sum_of(by, side.files, side.roots)
        elif masks is not None:
            yield side.part, actual, chosen(kind, by, side.files, masks[number], side.roots)
        else:
            scaled = list(zip(factors.weights, factors.scalings, strict=True))
            scaled_here = scaled if number == 0 else None
            exact = _side_by_side(by, side.files, scaled_here, actual.shape, actual.dtype, axis=number)
            yield side.part, actual, exact


def _roots(scales: Sequence[float], *, signed: bool) -> list[float]:
    """Return the share of each adapter in one factor; the first of the two carries the sign."""
    return [math.copysign(math.sqrt(abs(scale)), scale if signed else 1) for scale in scales]


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
    rest = [(0, 0)] * len(shape)
    rest[axis] = (0, shape[axis] - size)

    def put(parts: list[np.ndarray]) -> np.ndarray:
        return np.pad(np.concatenate(parts, axis=axis), rest)

    return Tracked(value=put([t.value for t in terms]), error=put([t.error for t in terms]), by=by)


def _unused(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name
