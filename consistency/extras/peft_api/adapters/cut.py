"""The layers in which deltas are combined and cut, and the records of what a device makes of them.

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
    """Names of the layers to cut, and why there are no others; empty where these are all."""

    paths: tuple[str, ...]
    reason: str


def layers_to_cut(several: MultiAdapterModel, weights: Sequence[float]) -> Sample:
    """Choose the layers whose deltas are combined and cut."""
    from peft.tuners.lora import layer as lora

    work: dict[str, int] = {}
    large = others = 0
    for path, layer in adapted_layers(several.model):
        for factors in factors_of(several, path, layer, weights):
            shorter, longer = sorted((factors.rows, factors.columns))
            is_product = isinstance(layer, (lora.Linear, lora.Embedding, lora.Conv2d, lora.MultiheadAttention))
            if not is_product or getattr(layer.get_base_layer(), "groups", 1) > 1:  # the factors of a group are smaller
                others += 1
            elif shorter * longer > CUT_ELEMENTS or longer > _LONGEST:
                large += 1
            else:
                work[path] = longer**2 * shorter
    chosen = list(work)
    if several.context.job.case.level is not Level.THOROUGH:
        chosen, total = [], 0
        for path, here in work.items():
            if total + here <= CUT_STEPS:
                chosen.append(path)
                total += here
        if work and not chosen:
            chosen = [min(work, key=lambda path: work[path])]
    reasons = []
    if len(chosen) < len(work):
        reasons.append(f"not cut in {len(work) - len(chosen)} further layers: level thorough cuts all")
    if large:
        reasons.append(f"too large in {large} layers, whose decompositions take gigabytes")
    if others:
        reasons.append(f"no definition for the deltas of {others} layers")
    return Sample(paths=tuple(chosen), reason="; ".join(reasons))


@contextmanager
def only_in(several: MultiAdapterModel, paths: Sequence[str] | None) -> Iterator[None]:
    """Let PEFT combine the adapters in some layers; None leaves it all of them."""
    configs = [several.model.peft_config[name] for name in several.names]
    targets = [config.target_modules for config in configs]
    try:
        if paths is not None:
            inside = {path.removeprefix("base_model.model.") for path in paths}
            for config in configs:
                config.target_modules = set(inside)
        yield
    finally:
        for config, target in zip(configs, targets, strict=True):
            config.target_modules = target


def check_cut(several: MultiAdapterModel, kind: str, place: str, factors: LayerFactors, *, rank: int) -> None:
    """Record both factors of a cut decomposition, and whether its vectors are orthonormal; of `svd` its values too."""
    context = several.context
    own_a, own_b = factors.combined
    a, b = own_a.to("cpu").reshape(len(own_a), -1), own_b.to("cpu").reshape(len(own_b), -1)
    if a.shape != (rank, factors.columns) or b.shape != (factors.rows, rank):
        context.record.fact(
            STAGE,
            place,
            f"{kind}.rank",
            status="outside",
            word=words.SHAPE,
            reason=f"the factors have the shapes {tuple(own_a.shape)} and {tuple(own_b.shape)} with a rank of {rank}",
        )
        return
    by = Arithmetic.of(own_a.dtype, products=products_of(context.device).matmul)
    if kind != "svd":
        for part, own, actual in ((factors.parts[0], own_a, a), (factors.parts[1], own_b, b)):
            row = TensorRecord(STAGE, place, f"{kind}.{part}", rule=Rule.PEER, status="measured", reason=NO_FORM)
            context.record.computed(row, actual, digests=[digest(own)])
        share = share_orthonormal(by, a.to(torch.float64), max(factors.rows, factors.columns))
        _record_orthonormal(several, kind, place, factors, share)
        return
    delta = combined_delta(_arithmetic(several, factors.dtype), factors)
    found = judge(delta, by, a.to(torch.float64), b.to(torch.float64))
    for part, own, actual, exact, allowed, share in (
        (factors.parts[0], own_a, a, found.exact_a, found.allowed_a, found.share_a),
        (factors.parts[1], own_b, b, found.exact_b, found.allowed_b, found.share_b),
    ):
        tolerance = context.record.tolerance(stage=STAGE, layer=place, dtype=own.dtype)
        limit, measured = tolerance or allowed.contiguous(), measure_against_exact(actual, exact, tolerance)
        context.record.computed(
            TensorRecord(STAGE, place, f"{kind}.{part}", rule=Rule.BOUND, status="measured"),
            actual,
            digests=[digest(own)],
            tolerance=tolerance,
            chunks=functools.partial(exact_chunks, actual, exact, limit),
            found=measured if tolerance else msgspec.structs.replace(measured, ratio=Real(share)),
            ingredients={"exact": exact, "allowed": None if tolerance else allowed.contiguous()},
        )
    right = passes(found.share_values)
    context.record.fact(
        STAGE,
        place,
        f"{kind}.singular values",
        status="within" if right else "outside",
        share=found.share_values,
        word=None if right else words.DIFFERS,
        reason=None if right else "singular values differ from those of the combined deltas",
        evidence={"values": found.values, "exact": found.exact_values, "is_cut_sure": found.is_cut_sure},
    )
    _record_orthonormal(several, kind, place, factors, found.share_orthonormal)


def _record_orthonormal(several: MultiAdapterModel, kind: str, place: str, factors: LayerFactors, share: float) -> None:
    right = passes(share)
    several.context.record.fact(
        STAGE,
        place,
        f"{kind}.orthonormal",
        status="within" if right else "outside",
        share=share,
        word=None if right else words.DIFFERS,
        reason=None if right else f"rows of {factors.parts[0]} are not orthonormal",
    )


def _arithmetic(several: MultiAdapterModel, dtype: torch.dtype) -> Arithmetic:
    """Return how the device computes deltas in a dtype."""
    device = several.context.device
    permitted = products_of(device)
    return Arithmetic.of(
        dtype,
        truncating=device.type != "cpu",
        products=permitted.matmul,
        partial_terms=permitted.partial_terms.get(name_of(dtype)),
    )
