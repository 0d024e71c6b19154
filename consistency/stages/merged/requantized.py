"""A LoRA merged into a quantized weight: PEFT dequantizes it, adds the delta, and quantizes the sum.

The result is judged against the exact sum, by what quantizing may do to it (`consistency.numerics.quantized`). The
error is reported in its own unit, the step: the distance of the two levels around a value, half of which is the most
that rounding to the nearest level can make. Beside it stands what the adapter adds, in the same unit: a delta that is
small against a step is mostly lost.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from consistency.capture.names import SAFE_WEIGHT, WEIGHT
from consistency.capture.records import TensorRecord
from consistency.numerics.bound import Allowance
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.error import measure_against_exact
from consistency.numerics.quantized import QuantizedWeight, Requantized
from consistency.numerics.rules import Rule
from consistency.worker.context import Context
from consistency.worker.judging.quantized_base import from_file
from consistency.worker.model.low_rank import LowRank, allowance_of
from consistency.worker.model.merging import NO_MERGE, digest_merged, merged
from consistency.worker.model.running import model_code

NO_FORMULA = "no exact value of this method's merge with a quantized weight is derived"


def record(context: Context, place: str, layer: Any, low_rank: LowRank | None) -> None:
    """Merge into a quantized weight, safely too where the level asks, and record the merged weight.

    Without factors, or without the base's file, the weight is recorded for the comparison of workers alone.
    """
    base = None if low_rank is None else from_file(context.base, place, layer.get_base_layer())
    exact = None
    ways = (False, True) if context.job.case.plan.safe_merge else (False,)
    for safe in ways:
        tensor = SAFE_WEIGHT if safe else WEIGHT
        with context.record.skipping("merged", tensor, layer=place):
            with model_code(context.device, "PEFT does not merge this layer: ", kinds=(*NO_MERGE, AssertionError)):
                with merged(layer, safe=safe) as weight:  # torchao refuses by an AssertionError
                    digests = [digest(weight)]
                digests += [digest_merged(layer, safe=safe) for _ in range(context.job.case.repeat - 1)]
            if base is None or low_rank is None or not base.shape == tuple(weight.shape) == low_rank.shape:
                # no exact sum: only the other workers can judge the weight
                row = TensorRecord("merged", place, tensor, rule=Rule.PEER, status="measured", reason=NO_FORMULA)
                context.record.computed(row, weight, digests=digests)
                continue
            exact = exact or _Exact(context, base, low_rank)  # of both merges: they add the same
            _record(context, place, tensor, weight, digests, exact)


class _Exact:
    """The exact sum of a quantized weight and a LoRA, in float64, and the bounds of quantizing it.

    Attributes
    ----------
    before, value : torch.Tensor
        The dequantized weight before the merge, and the exact sum.
    delta_rms : float
        Root mean square of the delta.
    requantized : Requantized
        Step and tolerance of each element of the sum.
    """

    def __init__(self, context: Context, base: QuantizedWeight, low_rank: LowRank) -> None:
        left, right = low_rank.left.double(), low_rank.right.double()
        before = base.rounded().to(torch.float64)
        delta = (left @ right).mul_(low_rank.scaling)
        self.delta_rms = _rms(delta)
        self.before = before
        self.value = before + delta
        # the sum is rounded once, in the wider dtype or, of a tensor that is added to in place, in the weight's own
        sized = torch.empty(0, dtype=base.dtype, device=context.device)
        allowed = allowance_of(low_rank, None, sized, roundings=2)
        assert isinstance(allowed, Allowance)
        magnitudes = (left.abs() @ right.abs()).mul_(abs(low_rank.scaling))
        self.requantized: Requantized = base.requantized(self.value, allowed.around(magnitudes, before))


def _record(
    context: Context, place: str, tensor: str, weight: torch.Tensor, digests: list[TensorDigest], exact: _Exact
) -> None:
    """Record a merged quantized weight against the exact sum."""
    host, step, allowed = weight.to("cpu"), exact.requantized.step, exact.requantized.allowed
    tolerance = context.record.tolerance(stage="merged", layer=place, dtype=weight.dtype)
    limit = tolerance or allowed
    # where the step is zero, any difference is a large number of steps
    least_step = torch.finfo(torch.float64).tiny
    steps = (host.double() - exact.value).abs_().div_(step.clamp(min=least_step))
    changed = host != exact.before.to(host.dtype)
    row = TensorRecord(
        "merged",
        place,
        tensor,
        rule=Rule.BOUND,
        status="measured",
        evidence={
            "requantized": "dequantized, added to, and quantized again",
            "error_in_steps_max": round(float(steps.max()), 4),
            "error_in_steps_rms": round(_rms(steps), 4),
            "error_rms": _rms(host.double() - exact.value),
            "delta_rms": exact.delta_rms,
            "changed_share": round(float(changed.double().mean()), 6),
        },
    )
    context.record.computed(
        row,
        weight,
        digests=digests,
        measure=measure_against_exact(host, exact.value, limit),
        tolerance=tolerance,
        chunks=lambda: exact_chunks(host, exact.value, limit),
        ingredients={"exact": exact.value},
    )


def _rms(values: torch.Tensor) -> float:
    return math.sqrt(float(values.square().mean())) if values.numel() else 0.0
