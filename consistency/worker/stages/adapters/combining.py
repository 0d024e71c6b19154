"""What `add_weighted_adapter` makes of the factors of several LoRAs, against its definition in float64.

`linear` adds the factors, each with the root of its weight times its scaling; `cat` puts them side by side, weight and
scaling in lora_A. `magnitude_prune` and `ties` leave out elements first (`pruned`). The other types cut singular
values, whose vectors are not unique, or elements by chance: no exact value is derived for these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from consistency.capture.names import module_place
from consistency.errors import first_line
from consistency.numerics.digest import digest
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.rules import Rule
from consistency.numerics.running_error import Arithmetic, Tracked
from consistency.worker.model.merging import adapted_layers
from consistency.worker.stages.adapters.pruned import DENSITY, PRUNED, pruned
from consistency.worker.stages.adapters.several import STAGE, Several
from consistency.worker.stages.bound_rule import record_bounded

TYPES = ("linear", "cat", *PRUNED)
_STEP = "add_weighted_adapter"

# (dictionary of a layer, suffix of its parameters' names) for the factors of linear and convolution layers, then of
# embeddings; A first
_FACTORS = ((("lora_A", ".weight"), ("lora_B", ".weight")), (("lora_embedding_A", ""), ("lora_embedding_B", "")))


def combine(several: Several) -> None:
    """Combine all adapters in each type that has a closed form, record the factors, and delete the combination."""
    if not hasattr(several.model, "add_weighted_adapter"):
        method = several.model.peft_config[several.names[0]].peft_type.value
        several.skipped(_STEP, "everything", f"PEFT has no add_weighted_adapter for {method}")
        return
    weights = [1 - 0.25 * number / len(several.names) for number in range(len(several.names))]
    for kind in TYPES:
        name = _unused(f"combined_{kind}", several.names)
        try:
            several.model.add_weighted_adapter(
                list(several.names), weights, name, combination_type=kind, density=DENSITY if kind in PRUNED else None
            )
        except ValueError as error:  # ranks, target modules or modules saved whole that PEFT does not combine
            several.refused(f"{_STEP}({kind})", f"PEFT does not combine them: {first_line(error)}")
            continue
        several.done(f"{_STEP}({kind})")
        _check(several, kind, name, weights)
        several.model.delete_adapter(name)
        several.check_deleted(f"{_STEP}({kind})", name)
        several.model.set_adapter(several.names[0])
    several.check_bytes(_STEP)


def _check(several: Several, kind: str, name: str, weights: Sequence[float]) -> None:
    scalings = set()
    for path, layer in adapted_layers(several.model):
        if name in getattr(layer, "scaling", {}):
            scalings.add(float(layer.scaling[name]))
        place = module_place(path)
        if several.context.record.wants(STAGE, place):
            for part, actual, exact in _factors(several, kind, path, layer, name, weights):
                if exact is None:
                    several.context.record.absent(
                        STAGE, place, f"{kind}.{part}", status="skipped", rule=Rule.BOUND,
                        reason="elements of equal magnitude in too many adapters: any of them may be left out",
                    )  # fmt: skip
                    continue
                record_bounded(
                    several.context.record, STAGE, place, f"{kind}.{part}", actual=actual.to("cpu"), exact=exact,
                    digests=[digest(actual)],
                )  # fmt: skip
    if scalings - {1.0}:
        # the factors hold weights and scalings already; rank-stabilized LoRA divides by the root of the rank alone
        several.skipped(
            f"{_STEP}({kind})", "scaling",
            f"PEFT gives the combination the scaling {', '.join(f'{s:g}' for s in sorted(scalings))} although its "
            "factors contain it: it is not the weighted sum of the adapters",
        )  # fmt: skip
    else:
        several.fact(f"{_STEP}({kind})", "scaling")


def _factors(
    several: Several, kind: str, path: str, layer: Any, name: str, weights: Sequence[float]
) -> Iterator[tuple[str, torch.Tensor, Tracked | None]]:
    """Yield name, actual and exact value of the factors of one layer, as far as the combination has them."""
    for pair in _FACTORS:
        if name not in getattr(layer, pair[0][0], {}):
            continue
        present = [
            (one, weight)
            for one, weight in zip(several.names, weights, strict=True)
            if f"{path}.{pair[0][0]}.{one}{pair[0][1]}" in several.expected[one]
        ]
        for side, (part, suffix) in enumerate(pair):
            held = getattr(layer, part)[name]
            actual = (held.weight if suffix else held).detach()
            if actual.dtype not in UNIT_ROUNDOFF or not present:
                continue
            by = Arithmetic.of(actual.dtype)
            files = [
                several.expected[one][f"{path}.{part}.{one}{suffix}"][1].to(actual.dtype).to(torch.float64).numpy()
                for one, _ in present
            ]
            scales = [weight * float(layer.scaling[one]) for one, weight in present]
            if kind == "linear":
                yield part, actual, _sum(by, files, scales, signed=side == 0)
            elif kind in PRUNED:
                roots = _roots(scales, signed=side == 0)
                yield part, actual, pruned(kind, by, files, roots, actual.to("cpu", torch.float64).numpy())
            else:
                scaled = [(weight, float(layer.scaling[one])) for one, weight in present]
                yield part, actual, _side_by_side(by, files, scaled if side == 0 else None, actual.shape, axis=side)


def _sum(by: Arithmetic, files: Sequence[np.ndarray], scales: Sequence[float], *, signed: bool) -> Tracked:
    terms = [
        (by.known(tensor) * by.constant(root)).store()
        for tensor, root in zip(files, _roots(scales, signed=signed), strict=True)
    ]
    total, *others = terms
    for term in others:
        total = total + term
    return total.store()


def _roots(scales: Sequence[float], *, signed: bool) -> list[float]:
    """Return the share of each adapter in one factor; the first of the two carries the sign."""
    return [math.copysign(math.sqrt(abs(scale)), scale if signed else 1) for scale in scales]


def _side_by_side(
    by: Arithmetic,
    files: Sequence[np.ndarray],
    scales: Sequence[tuple[float, float]] | None,
    shape: torch.Size,
    *,
    axis: int,
) -> Tracked:
    """Return the factors one after the other, and zeros up to the shape that PEFT allocates."""
    terms = [by.known(tensor) for tensor in files]
    if scales is not None:
        terms = [
            ((term * by.constant(weight)).store() * by.constant(scaling)).store()
            for term, (weight, scaling) in zip(terms, scales, strict=True)
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
