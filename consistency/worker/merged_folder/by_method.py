"""Weights that no low-rank delta gives: judged by a method's closed form, or by PEFT's own merge in float64.

A writer merged in some dtype of the weight and some dtype of the adapter, and rounded the result to that of the folder:
`dtypes_tried`. A form bounds each element for each of them (`worker/stages/merged/forms`). A method without a form is
allowed twice the largest error that PEFT's merge makes in these dtypes on the CPU, and the last rounding, as such
methods are in a run (`consistency.numerics.rules`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from consistency.numerics.error import measure_against_exact
from consistency.numerics.measure import Measure
from consistency.numerics.typed import Typed, half_ulp
from consistency.worker.merged_folder.adapter import ByForm, ByPeft, dtypes_tried
from consistency.worker.stages.merged.forms.form import Form, Judged
from consistency.worker.stages.merged.forms.source import Source


class _Cast(Form):
    """A form whose result is rounded once more, to the dtype of the folder."""

    def __init__(self, form: Form, dtype: torch.dtype) -> None:
        super().__init__(form.weight, rows=form.rows)
        self._form, self._dtype = form, dtype
        self.adds = form.adds

    def prepare(self, tested: Judged) -> Judged:
        return self._form.prepare(tested)

    def block(self, tensors: Sequence[Judged], rows: slice) -> Sequence[Typed]:
        def cast(one: Typed) -> Typed:
            total = np.abs(one.value + self.base(rows).value if self.adds else one.value)
            return replace(one, error=one.error + half_ulp(total + one.error, self._dtype), dtype=self._dtype)

        return [cast(one) for one in self._form.block(tensors, rows)]


def by_form(actual: torch.Tensor, base: torch.Tensor, target: ByForm) -> tuple[Measure, str] | None:
    """Return the best measure of a weight by its form, and in which dtypes it was merged; None where it has no form."""
    best: tuple[Measure, str] | None = None
    own = next(iter(target.files.values())).dtype
    for weight, adapter in dtypes_tried(actual.dtype, base.dtype, own):
        files = {name: tensor.to(adapter) for name, tensor in target.files.items()}
        form = target.make(Source(layer=target.layer, weight=base.to(weight), files=files, on_cpu=False))
        if form is None:
            return None
        if UNIT_ROUNDOFF[weight] < UNIT_ROUNDOFF[actual.dtype]:
            form = _Cast(form, actual.dtype)
        for safe in (False, True):
            (measure,) = form.measure([Judged(actual=actual.contiguous(), safe=safe)])
            best = _better(best, measure, f"{weight} and an adapter in {adapter}")
            if _passes(measure):
                return best
    return best


def by_peft(
    actual: torch.Tensor, target: ByPeft, base: torch.dtype, adapter: torch.dtype
) -> tuple[Measure, str] | None:
    """Return the same of a parameter that PEFT merges; None where it does not merge it."""
    best: tuple[Measure, str] | None = None
    for number in range(len(target.layers)):
        exact = target.merged(number, torch.float64, torch.float64)
        if exact is None or exact.shape != actual.shape:
            return best
        for weight, dtype in dtypes_tried(actual.dtype, base, adapter):
            made = target.merged(number, weight, dtype)
            if made is None:
                continue
            allowed = exact.abs() * UNIT_ROUNDOFF[actual.dtype] + HALF_SMALLEST_SUBNORMAL[actual.dtype]
            allowed += 2 * float((made.double() - exact).abs().max()) if made.numel() else 0.0
            measure = measure_against_exact(actual.contiguous(), exact, allowed)
            best = _better(best, measure, f"{weight} and an adapter in {dtype}")
            if _passes(measure):
                return best
    return best


def _better(best: tuple[Measure, str] | None, measure: Measure, text: str) -> tuple[Measure, str]:
    text = text.replace("torch.", "")
    return (measure, text) if best is None or _ratio(measure) < _ratio(best[0]) else best


def _ratio(measure: Measure) -> float:
    ratio = float(measure.ratio or 0.0)
    return ratio if ratio == ratio else float("inf")


def _passes(measure: Measure) -> bool:
    return _ratio(measure) <= 1


def passes(found: tuple[Measure, str]) -> bool:
    """Report whether a measure is within its tolerance."""
    return _passes(found[0])


def untouched(actual: torch.Tensor, base: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a tensor that no adapter changes may be: cast to the folder's dtype, maybe by way of a half type."""
    yield base.to(actual.dtype)
    for half in (torch.bfloat16, torch.float16):
        if half not in (actual.dtype, base.dtype):
            yield base.to(half).to(actual.dtype)
