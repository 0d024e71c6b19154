"""Weights that no low-rank delta gives: judged by a method's closed form, or by PEFT's own merge in float64.

A writer merged in some dtype of the weight and some dtype of the adapter, and rounded the result to that of the folder:
`_dtypes_tried`. A form bounds each element for each of them (`worker/stages/merged/forms`). A method without a form is
allowed twice the largest error that PEFT's merge makes in these dtypes on the CPU, and the last rounding, as such
methods are in a run (`consistency.numerics.rules`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from consistency.extras.merging.check_merged.adapter import ByForm, ByPeft
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.measure import Measure
from consistency.numerics.typed import HALF_TYPES, Typed, half_ulp
from consistency.stages.merged.forms.dora import Dora
from consistency.stages.merged.forms.form import Form, Judged
from consistency.stages.merged.forms.source import Source
from consistency.worker.model.adapter_settings import stated_scaling
from consistency.worker.model.loading import ADAPTER_NAME

_MOST_ROUNDINGS = {False: 2.0, True: 4.0}
"""Error over the tolerance of one merge, up to which another scaling explains a weight, and a second merge one."""


class _Cast(Form):
    """A form whose result is rounded once more, to the dtype of the folder.

    With `as_change` its difference from the weight is rounded first, and added to the weight again, as some writers do
    whose delta is that of a merged layer (axolotl's DoRA, mergekit).
    """

    def __init__(self, form: Form, dtype: torch.dtype, *, as_change: bool = False) -> None:
        super().__init__(form.weight, rows=form.rows)
        self._form, self._dtype, self._as_change = form, dtype, as_change
        self.adds = form.adds

    def prepare(self, tested: Judged) -> Judged:
        return self._form.prepare(tested)

    def block(self, tensors: Sequence[Judged], rows: slice) -> Sequence[Typed]:
        def cast(result: Typed) -> Typed:
            total, error = result.value, result.error
            if self.adds:  # the form gives the delta alone
                total = total + self.base(rows).value
            if self._as_change:
                change = total - self.base(rows).value
                error = error + half_ulp(np.abs(change) + error, self._dtype)
            error = error + half_ulp(np.abs(total) + error, self._dtype)
            return replace(result, error=error, dtype=self._dtype)

        return [cast(result) for result in self._form.block(tensors, rows)]


def judge_by_method(
    actual: torch.Tensor, base: torch.Tensor, target: ByForm | ByPeft
) -> tuple[Measure, float, str] | None:
    """Return the best measure of a weight, its ratio, and in which dtypes it was merged; None where nothing merges it.

    A ratio above 1 is beyond the tolerance.
    """
    measured = _by_form(actual, base, target) if isinstance(target, ByForm) else _by_peft(actual, base.dtype, target)
    best: tuple[Measure, float, str] | None = None
    for measure, weight, adapter in measured:
        ratio = float(measure.ratio or 0.0)
        if math.isnan(ratio):
            ratio = math.inf
        if best is None or ratio < best[1]:
            best = measure, ratio, f"{name_of(weight)} and an adapter in {name_of(adapter)}"
        if ratio <= 1:
            break
    return best


def other_scaling(actual: torch.Tensor, base: torch.Tensor, target: ByForm | ByPeft) -> dict[MergeCause, str]:
    """Explain a weight by another scaling of its method, or by a delta that was merged twice.

    Each is computed as the method itself computes it, by a layer with that scaling.
    """
    layer = target.layer if isinstance(target, ByForm) else target.layers[0]
    scaling, named = _named_scalings(layer)
    explanations: dict[MergeCause, list[str]] = {}
    for times, text in named.items():
        judgement = judge_by_method(actual, base, _scaled(target, times))
        is_twice = times == 2 and _adds(target, base)
        if judgement is not None and judgement[1] <= _MOST_ROUNDINGS[is_twice]:
            cause = MergeCause.TWICE if is_twice else MergeCause.WRONG_SCALE
            explanations.setdefault(cause, []).append("" if cause is MergeCause.TWICE else text)
    if MergeCause.WRONG_SCALE in explanations:
        text = " or ".join(explanations[MergeCause.WRONG_SCALE])
        return {MergeCause.WRONG_SCALE: f"{text} instead of {scaling:g}"}
    return dict.fromkeys(explanations, "")


def _adds(target: ByForm | ByPeft, base: torch.Tensor) -> bool:
    """Return whether the method adds a delta that does not depend on the base, so that twice of it is two merges."""
    if isinstance(target, ByPeft):
        return False
    form = target.make(Source(layer=target.layer, weight=base, files=target.files, on_cpu=False))
    return form is not None and form.adds


def _named_scalings(layer: Any) -> tuple[float, dict[float, str]]:
    """Return the scaling of a layer, and the factors by which a merge may miss it, in words; none without a scaling."""
    alphas = getattr(layer, "lora_alpha", None) or getattr(layer, "alpha", None) or {}
    ranks = getattr(layer, "r", None) or {}
    if ADAPTER_NAME not in alphas or ADAPTER_NAME not in ranks:
        return 1.0, {}
    alpha, rank = float(alphas[ADAPTER_NAME]), max(1, int(ranks[ADAPTER_NAME]))
    scaling = stated_scaling(layer) if hasattr(layer, "use_rslora") else alpha / rank
    values = {"1": 1.0, f"alpha ({alpha:g})": alpha, f"alpha / r ({alpha / rank:g})": alpha / rank}
    values |= {f"alpha / sqrt(r) ({alpha / math.sqrt(rank):g})": alpha / math.sqrt(rank)}
    values |= {"its square, as if applied twice": scaling**2, "its negative": -scaling, "twice of it": 2 * scaling}
    named: dict[float, str] = {}
    for text, value in values.items():
        if value != scaling and scaling:
            times = value / scaling
            named[times] = f"{named[times]} or {text}" if times in named else text
    return scaling, named


def _scaled(target: ByForm | ByPeft, times: float) -> ByForm | ByPeft:
    """Return a target of which each layer has another scaling."""

    def scaled(layer: Any) -> Any:
        twin = copy.copy(layer)
        for name in ("lora_alpha", "alpha", "scaling"):
            values = getattr(layer, name, None)
            if isinstance(values, dict) and ADAPTER_NAME in values:
                setattr(twin, name, {**values, ADAPTER_NAME: values[ADAPTER_NAME] * times})
        return twin

    if isinstance(target, ByForm):
        return replace(target, layer=scaled(target.layer))
    return replace(target, layers=tuple(scaled(layer) for layer in target.layers))


Measured = Iterator[tuple[Measure, torch.dtype, torch.dtype]]


def _by_form(actual: torch.Tensor, base: torch.Tensor, target: ByForm) -> Measured:
    """Yield a measure by the closed form for each pair of dtypes, of a plain and of a safe merge."""
    adapter_dtype = next(iter(target.files.values())).dtype
    for weight, adapter in _dtypes_tried(actual.dtype, base.dtype, adapter_dtype):
        files = {name: tensor.to(adapter) for name, tensor in target.files.items()}
        form = target.make(Source(layer=target.layer, weight=base.to(weight), files=files, on_cpu=False))
        if form is None:
            return
        if isinstance(form, Dora) and UNIT_ROUNDOFF[adapter] < UNIT_ROUNDOFF[weight]:
            (measure,) = form.with_rounded_delta().measure([Judged(actual=actual.contiguous(), safe=False)])
            yield measure, weight, adapter
        if UNIT_ROUNDOFF[weight] < UNIT_ROUNDOFF[actual.dtype]:
            form = _Cast(form, actual.dtype)
        for safe in (False, True):
            (measure,) = form.measure([Judged(actual=actual.contiguous(), safe=safe)])
            yield measure, weight, adapter
        if actual.dtype in HALF_TYPES:
            as_change = _Cast(form, actual.dtype, as_change=True)
            (measure,) = as_change.measure([Judged(actual=actual.contiguous(), safe=False)])
            yield measure, weight, adapter


def _by_peft(actual: torch.Tensor, base: torch.dtype, target: ByPeft) -> Measured:
    """Yield a measure by PEFT's own merge in float64 for each pair of dtypes; none where PEFT does not merge it."""
    for layer in target.layers:
        exact = target.merged(layer, torch.float64, torch.float64)
        if exact is None or exact.shape != actual.shape:
            return
        for weight, adapter in _dtypes_tried(actual.dtype, base, base):
            merged = target.merged(layer, weight, adapter)
            if merged is None:
                continue
            allowed = exact.abs() * UNIT_ROUNDOFF[actual.dtype] + HALF_SMALLEST_SUBNORMAL[actual.dtype]
            # A value that overflowed in these dtypes allows nothing: the merge may not make it.
            errors = (merged.double() - exact).abs()
            errors = errors[errors.isfinite()]
            allowed += 2 * float(errors.max()) if errors.numel() else 0.0
            yield measure_against_exact(actual.contiguous(), exact, allowed), weight, adapter


def _dtypes_tried(
    stored: torch.dtype, base: torch.dtype, adapter: torch.dtype
) -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """Yield the dtypes of weight and adapter in which a method may have been merged before the result was cast."""
    for weight in dict.fromkeys((torch.float32, base, stored)):
        if weight in UNIT_ROUNDOFF and weight != torch.float64:
            for adapter_dtype in dict.fromkeys((adapter, torch.float32, weight)):
                yield weight, adapter_dtype
