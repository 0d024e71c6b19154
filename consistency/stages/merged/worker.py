"""Stage `merged`: delta and merged weight of every adapted layer, through PEFT's own merge.

The merge of a method with a closed form, as LoRA has on any layer, is compared per element, by the derived bound, with
the exact value computed in float64 from the bytes in the files: on linear layers and embeddings by its two factors
(`low_rank.py`), else by its form (`forms/`). A method without one is compared with the same PEFT code run in float64 on
the CPU. A user's tolerance replaces either rule, around the same exact values.

The model is left as it was, to the bit: a layer is merged into a copy of its weight (`worker/model/merging.py`), so
besides the model there are a few copies of one layer's weight.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from consistency.capture.names import BIAS, DELTA, SAFE_BIAS, SAFE_WEIGHT, WEIGHT, module_place
from consistency.numerics.digest import digest
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.exact import Float64Mode
from consistency.numerics.file_tensor import Readable, mapped
from consistency.numerics.independent_errors import independent_lines
from consistency.numerics.measure import Measure
from consistency.numerics.rules import RoundingError, Rule
from consistency.numerics.typed import Typed
from consistency.stages.merged import requantized
from consistency.stages.merged.forms.bias import bias_of, exact_bias
from consistency.stages.merged.forms.form import Form
from consistency.stages.merged.forms.registry import form_of, maker_of
from consistency.stages.merged.judging import Computed, Truth, judge
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.judging.bound_rule import record_bounded
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.low_rank import LowRank, low_rank_of
from consistency.worker.model.merging import (
    NO_MERGE,
    adapted_layers,
    digest_merged,
    has_quantized_weight,
    merged,
    restored,
    taking,
    weight_name,
    weight_of,
)
from consistency.worker.model.running import model_code
from consistency.worker.precision import products_of
from consistency.worker.recorder import Skip

_TOGETHER_BYTES = 256 * 2**20
"""Tensors of a layer are held and measured together where its delta, in float32, is no larger. Their exact values are
made once then, half the work of measuring; but of a large vocabulary's layer one tensor is held at a time."""


def run(context: Context) -> None:
    """Record delta, merged weight and, where the level asks, safely merged weight of every adapted layer."""
    layers = list(adapted_layers(context.model))
    with context.record.skipping("merged", WEIGHT):
        if not layers:
            raise Skip("this adapter adds nothing to a weight: there is nothing to merge")
    for done, (name, layer) in enumerate(layers):
        place = module_place(name)
        if not context.record.wants("merged", place):
            continue
        context.events.step(place, done, len(layers))
        with context.base.onload(layer):
            _record_layer(context, name, place, layer)


def _record_layer(context: Context, name: str, place: str, layer: Any) -> None:
    """Record the delta and the merged weights of a layer.

    Parameters
    ----------
    name, place : str
        Name of the layer in the adapted model, and in the rows.
    """
    # linear layers and embeddings are judged by their two factors, all others by their form
    low_rank = low_rank_of(context.device, name, layer, context.expected)
    form = _form(context, name, layer) if low_rank is None else None
    deltas: list[Computed] = []  # one, or none where PEFT gives none
    # a method that only scales, as IA³, has no delta
    if hasattr(layer, "get_delta_weight"):
        lacks = _first_tensor_not_in_file(context, name, layer)
        deltas += _compute_delta(context, place, layer, Truth(low_rank=low_rank, form=form, lacks=lacks))
    if has_quantized_weight(layer):
        judge(context, place, deltas, {})
        deltas.clear()  # or the delta is held while the layer is merged
        requantized.record(context, place, layer, low_rank)
        return
    merged_weights = _merged_weights(context, name, place, layer, low_rank, form)
    if _fit_together(low_rank, form):
        _record_together(context, place, layer, deltas, merged_weights)
    else:
        _record_in_turn(context, place, deltas, merged_weights)


def _fit_together(low_rank: LowRank | None, form: Form | None) -> bool:
    """Return whether the tensors of a layer are held at once; without factors or form, that would save nothing."""
    shape: Sequence[int] = ()
    if form is not None:
        shape = form.shape
    elif low_rank is not None:
        shape = low_rank.shape
    return bool(shape) and 4 * math.prod(shape) <= _TOGETHER_BYTES


def _record_in_turn(context: Context, place: str, deltas: list[Computed], merged_weights: Iterator[Computed]) -> None:
    """Record the delta, then the merged weights, each before the next one is made; `deltas` is left empty."""
    measured_by_digest: dict[str, tuple[Measure | None, RoundingError | None]] = {}
    judge(context, place, deltas, measured_by_digest)
    deltas.clear()
    for computed in merged_weights:
        judge(context, place, [computed], measured_by_digest)
        del computed  # or it is held while the next one is made


def _record_together(
    context: Context, place: str, layer: Any, deltas: list[Computed], merged_weights: Iterator[Computed]
) -> None:
    """Make the merged weights of a layer, and record them with its delta: their exact values are made once."""
    # Half of the time of a plain LoRA's merge is computing the delta, so the merges take the one that is there; not
    # with `repeat`, where each run has to compute its own, for the runs are compared.
    delta = None
    if deltas and context.job.case.repeat == 1:
        delta = deltas[0].actual
    if delta is None:
        judge(context, place, [*deltas, *merged_weights], {})
        return
    version = delta._version
    with taking(layer, {ADAPTER_NAME: delta}):
        weights = list(merged_weights)
    if delta._version != version:  # a merge has written into it
        deltas[0] = replace(deltas[0], actual=delta_weight(layer))
    judge(context, place, [*deltas, *weights], {})


def _first_tensor_not_in_file(context: Context, name: str, layer: Any) -> str:
    """Return the first tensor of the adapter in a layer that its file does not hold, by PEFT's name; else ''."""
    for parameter_name, _ in layer.named_parameters():
        is_of_adapter = f".{ADAPTER_NAME}" in f".{parameter_name}"
        if is_of_adapter and f"{name}.{parameter_name}" not in context.expected:
            return str(parameter_name).partition(".")[0]
    return ""


def _form(context: Context, name: str, layer: Any) -> Form | None:
    """Return the closed form of a layer; None where its method has none, or its weight is in no format with a bound.

    A quantized weight is in no such format.
    """
    if maker_of(layer) is None or has_quantized_weight(layer) or weight_of(layer).dtype not in UNIT_ROUNDOFF:
        return None
    return form_of(context, name, layer, lambda: _base_weight(context, name, layer))


def _merged_weights(
    context: Context, name: str, place: str, layer: Any, low_rank: LowRank | None, form: Form | None
) -> Iterator[Computed]:
    """Yield the merged weights of a layer, and record its merged bias; record where PEFT does not merge."""
    # without factors and form no bound is derived: the error of rounding is measured instead
    rule = Rule.RELATIVE if low_rank is None and form is None else Rule.BOUND
    truth: Truth | None = None
    exact = exact_bias(context, name, layer)  # before the merge, which changes the bias in the layer
    ways = (False, True) if context.job.case.plan.safe_merge else (False,)
    for safe in ways:
        tensor = SAFE_WEIGHT if safe else WEIGHT
        with context.record.skipping("merged", tensor, layer=place, rule=rule):
            with model_code(context.device, "PEFT does not merge this layer: ", kinds=NO_MERGE):
                _refuse_without_weight(layer)
                tolerance = context.record.tolerance(stage="merged", layer=place, dtype=weight_of(layer).dtype)
                # before the merge: of a layer that is merged, PEFT merges no copy
                truth = truth or _truth(context, name, layer, low_rank, form)
                rounding = None if tolerance else _rounding_error(context, name, layer, truth, safe=safe)
                with merged(layer, safe=safe) as weight:
                    first_digest, bias = digest(weight), bias_of(layer)
                more_digests = [digest_merged(layer, safe=safe) for _ in range(context.job.case.repeat - 1)]
            if exact is not None and bias is not None:
                _record_bias(context, place, bias, exact, safe=safe)
            yield Computed(
                actual=weight,
                safe=safe,
                digests=[first_digest, *more_digests],
                rule=rule,
                truth=truth,
                tolerance=tolerance,
                rounding=rounding,
            )
            del weight  # or it is held while the safely merged one is made


def _record_bias(context: Context, place: str, bias: torch.Tensor, exact: Typed, *, safe: bool) -> None:
    """Record the bias that a merge has changed, by its bound."""
    tensor = SAFE_BIAS if safe else BIAS
    host, digests = bias.to("cpu"), [digest(bias)]
    record_bounded(context.record, "merged", place, tensor, actual=host, exact=exact, digests=digests)


def _refuse_without_weight(layer: Any) -> None:
    """Merge a layer without a weight of its own, such as a whole block, to get the error with which PEFT refuses it."""
    if hasattr(layer, "get_param") or hasattr(layer.get_base_layer(), weight_name(layer)):
        return
    with restored(layer):
        layer.merge(safe_merge=False, adapter_names=[ADAPTER_NAME])


def _base_weight(context: Context, name: str, layer: Any) -> torch.Tensor:
    """Return the weight before the merge: the file's bytes, or the device's where no file holds it unchanged."""
    weight_path = f"base_layer.{weight_name(layer)}"
    if hasattr(layer, "get_param"):  # below further wrappers, if several parameters of a module are adapted
        adapted = layer.get_param()
        weight_path = next(path for path, parameter in layer.named_parameters() if parameter is adapted)
    in_file = context.expected_under(name, weight_path)
    return weight_of(layer).to("cpu", copy=True) if in_file is None else in_file


def _compute_delta(context: Context, place: str, layer: Any, truth: Truth) -> list[Computed]:
    """Return the delta that PEFT gives of a layer; record why where it gives none, and return an empty list."""
    refuses = model_code(context.device, "PEFT gives no delta of this layer: ", kinds=(*NO_MERGE, KeyError))
    with context.record.skipping("merged", DELTA, layer=place):
        with refuses, torch.no_grad():
            delta = delta_weight(layer)
            more_digests = [digest(delta_weight(layer)) for _ in range(context.job.case.repeat - 1)]
        tolerance = context.record.tolerance(stage="merged", layer=place, dtype=delta.dtype)
        digests = [digest(delta), *more_digests]
        return [Computed(actual=delta, safe=None, digests=digests, rule=Rule.BOUND, truth=truth, tolerance=tolerance)]
    return []


def delta_weight(layer: Any) -> torch.Tensor:
    """Return what a merge would add to a layer's weight; raises one of `NO_MERGE` where PEFT gives no tensor."""
    delta = layer.get_delta_weight(ADAPTER_NAME)
    if not isinstance(delta, torch.Tensor):  # BOFT: the rotations that make it
        raise TypeError(f"get_delta_weight gives a {type(delta).__name__}, not a tensor")
    return delta if delta.layout is torch.strided else delta.to_dense()  # SHiRA's is sparse


def _truth(context: Context, name: str, layer: Any, low_rank: LowRank | None, form: Form | None) -> Truth:
    """Return the reference of a layer's merged weight; a safe merge is the same function in exact arithmetic.

    Empty where the weight is of no number format to bound, or where PEFT does not merge a copy in
    float64: then the other workers are the reference.
    """
    if form is not None:
        return Truth(form=form)
    if weight_of(layer).dtype not in UNIT_ROUNDOFF:
        return Truth()
    if low_rank is not None:
        return Truth(low_rank=low_rank, base=_base_weight(context, name, layer))
    try:
        with model_code(context.device, kinds=NO_MERGE):
            twin = _copy_from_files(context, name, layer).double()
            with Float64Mode():
                return Truth(exact=_merge_copy(twin, safe=False))
    except Skip:
        return Truth()


def _rounding_error(context: Context, name: str, layer: Any, truth: Truth, *, safe: bool) -> RoundingError | None:
    """Return the error that rounding makes in a merge without closed form, with products as on the device.

    The elements of a row or a column may share one error, as by a norm: see `independent_lines`.
    """
    exact = truth.exact
    if exact is None:
        return None

    def count_independent(weight: Readable, exact_weight: Readable) -> int:
        # `independent_lines` takes `(passes, *shape)`: this is one pass
        return independent_lines(mapped(weight)[None], mapped(exact_weight)[None])

    def independent_by_name(weight: torch.Tensor) -> dict[str, int]:
        return {name: count_independent(weight, exact)} if weight.shape == exact.shape else {}

    def merge() -> torch.Tensor:
        with _disable_current_modes():  # reading the files is not part of the merge
            twin = _copy_from_files(context, name, layer)
        return _merge_copy(twin, safe=safe)

    passes = cpu_error.passes_for(exact.numel() * max(exact.shape, default=1))
    drawn = cpu_error.draw(products_of(context.device), passes, merge, independent_by_name)
    if drawn[0].shape != exact.shape:
        return None
    return cpu_error.rounding_error(drawn, exact, count_independent)


def _copy_from_files(context: Context, name: str, layer: Any) -> Any:
    """Copy one layer to the CPU and give it the bytes in the files, so that no fault of the device is in it."""
    twin = copy.deepcopy(layer).to("cpu")
    # a tensor that no file holds stays as the device has it
    with torch.no_grad():
        for path, tensor in (*twin.named_parameters(), *twin.named_buffers()):
            if f"{name}.{path}" in context.expected:
                tensor.copy_(context.expected[f"{name}.{path}"][1])
            elif path.startswith("base_layer."):
                in_file = context.expected_under(name, path)
                if in_file is not None:
                    tensor.copy_(in_file)
    return twin


def _merge_copy(twin: Any, *, safe: bool) -> torch.Tensor:
    """Merge into a copy of a layer, which stays merged; return its weight."""
    with torch.no_grad():
        twin.merge(safe_merge=safe, adapter_names=[ADAPTER_NAME])
        return weight_of(twin)
