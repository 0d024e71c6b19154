"""The layers in which deltas are combined and cut, and the records of a device's results.

A decomposition of a large matrix takes seconds, with PEFT's full matrices more for a flat one, so a run takes the first
layers that fit into a fixed amount of work, and all at level `thorough`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch

from consistency.capture.records import TensorRecord
from consistency.case.stage import Level
from consistency.extras.peft_api.adapters.cost import CUT_ELEMENTS, CUT_STEPS
from consistency.extras.peft_api.adapters.layer_factors import LayerFactors, factors_of
from consistency.extras.peft_api.adapters.multi_adapter_model import STAGE, MultiAdapterModel
from consistency.extras.peft_api.adapters.truncated import combined_delta, judge, share_orthonormal
from consistency.numerics import words
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.real import Real
from consistency.numerics.rules import Rule, passes
from consistency.numerics.running_error import Arithmetic
from consistency.worker.model.merging import adapted_layers
from consistency.worker.precision import products_of

_LONGEST = 1 << 14
"""Longer side of a delta: PEFT asks for full matrices, 1 GiB at this length."""

NO_FORM = "no closed form judges this type, whose deltas lose elements before they are cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The layers in which deltas are cut: their names, and why there are no others, empty where these are all."""

    paths: tuple[str, ...]
    reason: str


def layers_to_cut(multi_model: MultiAdapterModel, weights: Sequence[float]) -> Sample:
    """Choose the layers whose deltas are combined and cut."""
    from peft.tuners.lora import layer as lora

    work: dict[str, int] = {}
    large = without_form = 0
    for path, layer in adapted_layers(multi_model.model):
        for factors in factors_of(multi_model, path, layer, weights):
            shorter, longer = sorted((factors.rows, factors.columns))
            is_product = isinstance(layer, (lora.Linear, lora.Embedding, lora.Conv2d, lora.MultiheadAttention))
            if not is_product or getattr(layer.get_base_layer(), "groups", 1) > 1:  # the factors of a group are smaller
                without_form += 1
            elif shorter * longer > CUT_ELEMENTS or longer > _LONGEST:
                large += 1
            else:
                work[path] = longer**2 * shorter
    chosen = list(work)
    if multi_model.context.job.case.level is not Level.THOROUGH:
        chosen = _first_within_budget(work)
    reasons = []
    if len(chosen) < len(work):
        reasons.append(f"not cut in {len(work) - len(chosen)} further layers: level thorough cuts all")
    if large:
        reasons.append(f"too large in {large} layers, whose decompositions take gigabytes")
    if without_form:
        reasons.append(f"no definition for the deltas of {without_form} layers")
    return Sample(paths=tuple(chosen), reason="; ".join(reasons))


def _first_within_budget(work: dict[str, int]) -> list[str]:
    """Return the first layers whose decompositions take a fixed number of steps together; one at least."""
    chosen: list[str] = []
    total = 0
    for path, steps in work.items():
        if total + steps <= CUT_STEPS:
            chosen.append(path)
            total += steps
    if work and not chosen:
        chosen = [min(work, key=lambda path: work[path])]
    return chosen


@contextmanager
def only_in(multi_model: MultiAdapterModel, paths: Sequence[str] | None) -> Iterator[None]:
    """Let PEFT combine the adapters in some layers alone; with None, in all of them."""
    configs = [multi_model.model.peft_config[name] for name in multi_model.names]
    targets = [config.target_modules for config in configs]
    # PEFT makes a combination in the layers that the adapters' configs name
    try:
        if paths is not None:
            inside = {path.removeprefix("base_model.model.") for path in paths}
            for config in configs:
                config.target_modules = set(inside)
        yield
    finally:
        for config, target in zip(configs, targets, strict=True):
            config.target_modules = target


def check_cut(multi_model: MultiAdapterModel, kind: str, place: str, factors: LayerFactors, *, rank: int) -> None:
    """Record both factors of a cut decomposition, and whether its vectors are orthonormal.

    The factors and singular values of `svd` are judged too; other types lose elements before they are cut.
    """
    context = multi_model.context
    device_a, device_b = factors.combined
    a, b = device_a.to("cpu").reshape(len(device_a), -1), device_b.to("cpu").reshape(len(device_b), -1)
    if a.shape != (rank, factors.columns) or b.shape != (factors.rows, rank):
        context.record.fact(
            STAGE,
            place,
            f"{kind}.rank",
            status="outside",
            word=words.SHAPE,
            reason=f"the factors have the shapes {tuple(device_a.shape)} and {tuple(device_b.shape)} "
            f"with a rank of {rank}",
        )
        return
    by = Arithmetic.of(device_a.dtype, products=products_of(context.device).matmul)
    part_a, part_b = factors.parts
    if kind != "svd":
        for part, on_device, actual in ((part_a, device_a, a), (part_b, device_b, b)):
            row = TensorRecord(STAGE, place, f"{kind}.{part}", rule=Rule.PEER, status="measured", reason=NO_FORM)
            context.record.computed(row, actual, digests=[digest(on_device)])
        ratio = share_orthonormal(by, a.to(torch.float64), max(factors.rows, factors.columns))
        _record_orthonormal(multi_model, kind, place, factors, ratio)
        return
    delta = combined_delta(_arithmetic(multi_model, factors.dtype), factors)
    judged = judge(delta, by, a.to(torch.float64), b.to(torch.float64))
    for part, on_device, actual, exact, allowed, ratio in (
        (part_a, device_a, a, judged.exact_a, judged.allowed_a, judged.share_a),
        (part_b, device_b, b, judged.exact_b, judged.allowed_b, judged.share_b),
    ):
        tolerance = context.record.tolerance(stage=STAGE, layer=place, dtype=on_device.dtype)
        limit, measured = tolerance or allowed.contiguous(), measure_against_exact(actual, exact, tolerance)
        if not tolerance:
            measured = msgspec.structs.replace(measured, ratio=Real(ratio))
        context.record.computed(
            TensorRecord(STAGE, place, f"{kind}.{part}", rule=Rule.BOUND, status="measured"),
            actual,
            digests=[digest(on_device)],
            tolerance=tolerance,
            chunks=functools.partial(exact_chunks, actual, exact, limit),
            measure=measured,
            ingredients={"exact": exact, "allowed": None if tolerance else allowed.contiguous()},
        )
    is_right = passes(judged.share_values)
    context.record.fact(
        STAGE,
        place,
        f"{kind}.singular values",
        status="within" if is_right else "outside",
        ratio=judged.share_values,
        word=None if is_right else words.DIFFERS,
        reason=None if is_right else "singular values differ from those of the combined deltas",
        evidence={"values": judged.values, "exact": judged.exact_values, "is_cut_sure": judged.is_cut_sure},
    )
    _record_orthonormal(multi_model, kind, place, factors, judged.share_orthonormal)


def _record_orthonormal(
    multi_model: MultiAdapterModel, kind: str, place: str, factors: LayerFactors, ratio: float
) -> None:
    is_right = passes(ratio)
    multi_model.context.record.fact(
        STAGE,
        place,
        f"{kind}.orthonormal",
        status="within" if is_right else "outside",
        ratio=ratio,
        word=None if is_right else words.DIFFERS,
        reason=None if is_right else f"rows of {factors.parts[0]} are not orthonormal",
    )


def _arithmetic(multi_model: MultiAdapterModel, dtype: torch.dtype) -> Arithmetic:
    """Return the arithmetic of the device's deltas in a dtype."""
    device = multi_model.context.device
    permitted = products_of(device)
    return Arithmetic.of(
        dtype,
        truncating=device.type != "cpu",
        products=permitted.matmul,
        partial_terms=permitted.partial_terms.get(name_of(dtype)),
    )
