"""Merged against unmerged in the user's dtype: how far merging moves the outputs, and how far rounding alone must.

A merged weight has to be a number of the dtype, so W + dW is rounded, and the outputs move even where every step is
right. Passes in float64 tell this apart from what the merge itself loses, for the rounding of activations is not in
them. They differ in the weights of the adapted layers alone:

* `unmerged`: W, with the adapter beside it;
* `exact`: W + dW, merged by PEFT in float64;
* `rounded`: the same, rounded once to the dtype;
* `merged`: as PEFT merges them in the dtype;
* `float32`: as PEFT merges them where everything is float32, and stays so.

`rounded - exact` is what rounding must do, `merged - rounded` what the merge adds to it, and `exact - unmerged` is zero
unless the method's merged layer is another function. The float64 pass of the stage is `unmerged`. Where the model
decides, all passes decide as that one did: a router that flips is no rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from msgspec.structs import replace

from consistency.capture.merge_effect import MergeEffect
from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON, MERGING, WHOLE_MODEL
from consistency.capture.records import TensorRecord
from consistency.case.stage import Level
from consistency.case.stages import MOST_MERGED
from consistency.numerics.decisions import Watch
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.exact import Float64Mode, in_float64
from consistency.numerics.real import Real
from consistency.numerics.rules import Rule
from consistency.stages.forward.passes import MERGING as MERGING_PASSES
from consistency.worker.context import Context
from consistency.worker.decisions.replay import deciding
from consistency.worker.model.inputs import first_sequences
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import (
    adapted_layers,
    has_quantized_weight,
    in_merged,
    merged_into,
    restored,
    weight_of,
)
from consistency.worker.model.running import Activations, activations, base_of, matrix_elements, model_code
from consistency.worker.recorder import Skip

Merging = AbstractContextManager[None]


def record_merge_effect(
    context: Context,
    model: torch.nn.Module,
    inputs: Activations,
    *,
    computed: Mapping[str, Activations],
    refused: Mapping[str, str],
    exact: Activations,
    again: Callable[[], Watch | None],
) -> None:
    """Record what merging does to the outputs of a model on the CPU.

    Parameters
    ----------
    computed : mapping of str to dict
        The outputs of the passes in the model's dtype, by mode and name.
    refused : mapping of str to str
        Why a mode has no outputs, by mode.
    exact : dict of str to Tensor
        The outputs of the float64 passes, by `mode::name`.
    again : callable
        Returns what lets a pass decide as the float64 one did; None where the model decides nothing.
    """
    if ADAPTER_ON not in computed or context.job.case.only:
        return
    effect = MergeEffect(dtype=context.base.dtype)
    try:
        with model_code(model):
            effect = _effect_of_computed(context, model, computed, refused, exact)
            if not effect.reason:
                effect = _with_float64_passes(context, model, inputs, effect, exact, again)
    except Skip as skip:
        effect = replace(effect, left_out=str(skip))
    context.record.write(
        TensorRecord(MERGING, WHOLE_MODEL, effect.output, status="equal", rule=Rule.LIMIT, merging=effect)
    )


def _effect_of_computed(
    context: Context,
    model: Any,
    computed: Mapping[str, Activations],
    refused: Mapping[str, str],
    exact: Activations,
) -> MergeEffect:
    """Return the figures that the passes of the stage give; parameters are as in `record_merge_effect`."""
    layers = [layer for _, layer in adapted_layers(model)]
    # the pass in the merged mode was refused, or there is nothing to merge
    if ADAPTER_MERGED not in computed or not layers:
        method = getattr(model.peft_config[ADAPTER_NAME].peft_type, "value", "")
        no_merge = f"{method} changes no weight of the base, so there is nothing to merge"
        return MergeEffect(dtype=context.base.dtype, reason=refused.get(ADAPTER_MERGED, no_merge))
    name = _output_name(computed[ADAPTER_ON])
    unmerged, merged = computed[ADAPTER_ON][name], computed[ADAPTER_MERGED][name]
    exact_on, exact_off = (exact.get(f"{mode}::{name}") for mode in (ADAPTER_ON, ADAPTER_OFF))
    fields: dict[str, Any] = {}
    # a head with one output has no most likely word
    if name.endswith("logits") and unmerged.dim() in (2, 3) and unmerged.shape[-1] > 1:
        fields["positions"] = unmerged.shape[:-1].numel()
        fields["top1_changed"] = _count_other_top1(merged, unmerged)
        if exact_on is not None and exact_on.shape == unmerged.shape:
            fields["top1_unmerged"] = _count_other_top1(unmerged, exact_on)
    # of a large model the exact pass has the first sequence alone, so the first dimensions may differ
    if exact_on is not None and exact_on.shape[1:] == unmerged.shape[1:]:
        fields["unmerged_error"] = _largest_difference(unmerged[: len(exact_on)], exact_on)
        fields["merged_error"] = _largest_difference(merged[: len(exact_on)], exact_on)
        if exact_off is not None and exact_off.shape == exact_on.shape:
            fields["adapter"] = _largest_difference(exact_off, exact_on)
    return MergeEffect(
        dtype=_widest_rounding(layers, default=context.base.dtype),
        output=name,
        computed=_largest_difference(merged, unmerged),
        shared=_shared_weights(model),
        **fields,
    )


def _widest_rounding(layers: Sequence[Any], *, default: str) -> str:
    """Return the name of the dtype with the largest unit roundoff among the weights that are merged into."""
    dtypes = {weight_of(layer).dtype for layer in layers} & UNIT_ROUNDOFF.keys()
    if not dtypes:
        return default
    return name_of(max(dtypes, key=lambda dtype: UNIT_ROUNDOFF[dtype]))


def _shared_weights(model: torch.nn.Module) -> tuple[str, ...]:
    """Name the weights that several layers share, one of them adapted, as a tied head and the embeddings do."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for place, module in base_of(model).named_modules():  # a module in two places is adapted in both
        for name, parameter in module.named_parameters(prefix=place.removesuffix(".base_layer"), recurse=False):
            names.setdefault(parameter, []).append(name)
    merged: dict[torch.nn.Parameter, None] = {}
    for _, layer in adapted_layers(model):
        merged |= dict.fromkeys(merged_into(layer))
    shared = [names[parameter] for parameter in merged if len(names.get(parameter, ())) > 1]
    return tuple(" and ".join(layer_names) for layer_names in shared)


def _with_float64_passes(
    context: Context,
    model: Any,
    inputs: Activations,
    effect: MergeEffect,
    exact: Activations,
    again: Callable[[], Watch | None],
) -> MergeEffect:
    """Add the figures that take float64 passes of a merged model, or why there are none."""
    exact_on = exact.get(f"{ADAPTER_ON}::{effect.output}")
    if exact_on is None:
        return replace(effect, left_out="the model does not run in float64")
    left_out = _why_left_out(context, model)
    if left_out:
        return replace(effect, left_out=left_out)
    # one sequence has as many logits as positions times words: more would take longer, and tell no more; but decisions
    # are those of a whole batch
    chosen = first_sequences(inputs, 1) if again() is None else inputs
    merges = {"as PEFT does": _in_its_dtype, "rounded once": _rounded_once, "in float64": _in_float64}
    if effect.dtype != name_of(torch.float32):
        merges["in float32"] = _in_float32
    outputs: list[torch.Tensor] = []
    run = functools.partial(activations, model, chosen)
    for done, (name, merge) in enumerate(merges.items()):
        with context.events.passes(MERGING_PASSES):
            context.events.step(f"merged {name}, float64", done, len(merges))
        with torch.no_grad(), Float64Mode() as mode, deciding(again(), gradient=False):
            outputs.append(in_merged(model, run, merge=functools.partial(merge, mode))[effect.output])
    merged, rounded, unrounded, *in_float32 = outputs
    unmerged = exact_on[: merged.shape[0]]
    if unmerged.shape != merged.shape:  # the first dimension of the output is not that of the inputs
        unmerged = in_float64(run)[effect.output]
    effect = replace(
        effect,
        moved=_largest_difference(merged, unmerged),
        must=_largest_difference(rounded, unrounded),
        exact=_largest_difference(unrounded, unmerged),
    )
    if in_float32:
        effect = replace(effect, float32=_largest_difference(in_float32[0], unmerged))
    return effect


def _why_left_out(context: Context, model: torch.nn.Module) -> str:
    """Return why there are no float64 passes of a merged model; empty where there are."""
    layers = [layer for _, layer in adapted_layers(model)]
    weights = [weight_of(layer) for layer in layers]
    if any(weight.dtype == torch.float64 for weight in weights):
        return "float64 is the widest dtype"
    has_no_float_format = any(weight.dtype not in UNIT_ROUNDOFF for weight in weights)
    if has_no_float_format or any(map(has_quantized_weight, layers)):
        return "merging into quantized weights quantizes them again, which is no rounding to a float format"
    largest = max(weight.numel() for weight in weights)
    if largest > MOST_MERGED:
        return f"a layer of {largest} elements is too large to be merged in float64"
    if matrix_elements(model) > context.job.case.plan.float64_merges:
        return f"of a model of this size, level {Level.THOROUGH} measures it"
    return ""


def _in_its_dtype(mode: Float64Mode, layer: Any) -> Merging:
    return _merged(mode, layer, None)


def _in_float32(mode: Float64Mode, layer: Any) -> Merging:
    return _merged(mode, layer, torch.float32)


def _in_float64(mode: Float64Mode, layer: Any) -> Merging:
    return _merged(mode, layer, torch.float64)


def _rounded_once(mode: Float64Mode, layer: Any) -> Merging:
    return _merged(mode, layer, torch.float64, rounded=True)


@contextmanager
def _merged(mode: Float64Mode, layer: Any, dtype: torch.dtype | None, *, rounded: bool = False) -> Iterator[None]:
    """Merge a layer by PEFT's own code within the context.

    Parameters
    ----------
    mode : Float64Mode
        In force, and paused for what is not computed in float64.
    dtype : torch.dtype or None
        What the merge computes in; None for the layer's own.
    rounded : bool
        Round the merged weights to the layer's own dtype.
    """
    with ExitStack() as stack:
        with mode.paused():
            stack.enter_context(restored(layer))
            own_dtypes = [parameter.dtype for parameter in merged_into(layer)]
            if dtype is not None:
                stack.enter_context(_converted(layer, dtype))
        with nullcontext() if dtype is torch.float64 else mode.paused():
            layer.merge(safe_merge=False, adapter_names=[ADAPTER_NAME])
        if rounded:
            with mode.paused():
                for parameter, own_dtype in zip(merged_into(layer), own_dtypes, strict=True):
                    parameter.data = parameter.data.to(own_dtype)
        yield


@contextmanager
def _converted(layer: Any, dtype: torch.dtype) -> Iterator[None]:
    """Convert the weights of a layer, and to float32 its adapter too, which `Float64Mode` widens itself."""
    for parameter in merged_into(layer):  # copies, which `restored` takes away
        parameter.data = parameter.data.to(dtype)
    if dtype is torch.float64:
        yield
        return
    base = {id(parameter) for parameter in layer.get_base_layer().parameters()}
    originals = [
        (parameter, parameter.data)
        for parameter in layer.parameters()
        if id(parameter) not in base and parameter.dtype in UNIT_ROUNDOFF
    ]
    try:
        for parameter, data in originals:
            parameter.data = data.to(torch.promote_types(data.dtype, dtype))
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data


def _output_name(outputs: Activations) -> str:
    """Return the name of the output that is compared: logits, or else the first."""
    return next((name for name in outputs if name.endswith("logits")), next(iter(outputs)))


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> Real:
    """Return the largest difference; equal infinities, as those of words that are ruled out, do not differ."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    return Real(float(torch.where(a == b, 0.0, a - b).abs().max()))


def _count_other_top1(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return at how many positions two outputs have another most likely word."""
    return int((a.argmax(-1) != b.argmax(-1)).sum())
