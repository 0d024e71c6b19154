"""Stage `adapters`: several adapters in one model, loaded, switched, combined, merged, replaced and deleted.

Each is loaded alone first, then all of them into one model. After every step the bytes of the adapters and of the base
are compared with their files, and results with those of the adapter alone: on one device they are the same program on
the same numbers, so no bit may differ. What is computed, combined factors and merged weights, has a derived bound.

It uses PEFT's public functions alone, and a step that PEFT refuses is `skipped` with its reason. The model
is left as it was: `worker/model/structure.py` puts back the modules that the stage found.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from msgspec.structs import replace

from consistency.capture.names import TO_DO, WHOLE_MODEL, adapter_place
from consistency.capture.records import TensorRecord
from consistency.case.named_adapters import NamedAdapter
from consistency.extras.peft_api.adapters.combining import combine
from consistency.extras.peft_api.adapters.hotswap import hotswap
from consistency.extras.peft_api.adapters.merging import merge
from consistency.extras.peft_api.adapters.multi_adapter_model import (
    MOST_IN_EVIDENCE,
    STAGE,
    Digests,
    MultiAdapterModel,
    results,
)
from consistency.numerics import words
from consistency.numerics.dtype import name_of
from consistency.numerics.rules import Rule
from consistency.worker.context import Context, inputs_fit
from consistency.worker.environment import release
from consistency.worker.model.expected_adapter import expected_adapter, is_made_anew
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.loading import UNUSABLE, load_adapter
from consistency.worker.model.low_rank import Expected
from consistency.worker.model.running import model_code
from consistency.worker.model.structure import Structure
from consistency.worker.model.weight_files import WeightFiles
from consistency.worker.recorder import Skip

_WIDENED = (torch.float16, torch.bfloat16)
"""Dtypes of a base in which PEFT widens an adapter, if it is asked to."""


def run(context: Context) -> None:
    """Record every step, and put the model back."""
    _require_several(context)
    whole = Structure(context.model)
    try:
        with warnings.catch_warnings():
            # that an adapter is merged over another, or is active when it is deleted, is meant here
            warnings.filterwarnings("ignore", category=UserWarning, module="peft")
            first = context.job.case.adapters[0]
            if context.rewritten:
                _record_rewriting(context, first, context.rewritten)
                return
            multi_model = _load(context)
            if multi_model is None:
                return
            _check_loaded(multi_model)
            for done, (step, check) in enumerate(_STEPS.items()):
                context.events.step(step, done, len(_STEPS))
                _unless_refused(multi_model, step, check)
    finally:
        whole.restore()


def _require_several(context: Context) -> None:
    if context.bare is None:
        raise Skip("the case has one adapter: give several as --adapter NAME=PATH")
    if context.base.offload is not None:
        raise Skip("the base is streamed from the host: adapters are switched on a model that is on its device")


def _record_rewriting(context: Context, adapter: NamedAdapter, rewritten: Collection[str]) -> None:
    """Record that loading an adapter rewrites the base, so that it cannot share a model with others."""
    names = sorted(rewritten)
    reason = (
        f"loading {adapter.name} rewrites {len(names)} weights of the base, such as {names[0]}, so that every other "
        "adapter in the model is on another base"
    )
    conversion = (
        f"convert {adapter.name} to an adapter of the unchanged base: load it alone, and save it by PEFT's "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
    )
    tensors = len(context.base.tensors)
    evidence = {"tensors": tensors, "changed": names[:MOST_IN_EVIDENCE], TO_DO: conversion}
    step = f"loading {adapter.name}"
    word = words.BYTES_CHANGED
    context.record.fact(STAGE, step, "bytes of the base", status="outside", word=word, reason=reason, evidence=evidence)


def _load(context: Context) -> MultiAdapterModel | None:
    """Load each adapter alone, for its results, then all into one model; None where one of them rewrites the base."""
    case, bare = context.job.case, context.bare
    assert bare is not None
    autocast = context.job.autocast_adapter_dtype
    inputs, off, alone = _inputs(context), dict[str, str](), dict[str, Digests]()
    bare.restore()
    if inputs is not None:
        try:
            with model_code(context.base.model):
                off = results(context.base.model, inputs)
        except Skip as skip:
            _no_results(context, str(skip))
            inputs = None
    for done, adapter in enumerate(case.adapters):
        context.events.step(f"{adapter.name} alone", done, len(case.adapters))
        model: Any = load_adapter(context.base, case, instead=adapter, autocast=autocast).model
        if rewritten := context.changed_base():
            _record_rewriting(context, adapter, rewritten)
            return None
        if inputs is not None:
            alone[adapter.name] = results(model, inputs)
        del model
        bare.restore()
    first, *further = case.adapters
    model = load_adapter(context.base, case, instead=first, autocast=autocast).model
    for adapter in further:
        with model_code(context.device, f"PEFT does not load {adapter.name} beside {first.name}: ", kinds=UNUSABLE):
            model.load_adapter(adapter.path, adapter_name=adapter.name, autocast_adapter_dtype=autocast)
    if release("peft") < (0, 19):
        _load_again(context, model)
    model.eval()
    state = model.state_dict(keep_vars=True)
    expected = {adapter.name: _expected_tensors(context, model, state, adapter) for adapter in case.adapters}
    return MultiAdapterModel(context=context, model=model, expected=expected, inputs=inputs, alone=alone, off=off)


def _expected_tensors(context: Context, model: Any, state: dict[str, torch.Tensor], adapter: NamedAdapter) -> Expected:
    """Return the tensors of an adapter's file by the names of the parameters that hold them.

    Parameters that PEFT makes anew, without a tensor of the file, are left out.
    """
    files = WeightFiles.of_adapter(adapter.path, allow_pickle=context.job.case.allow_pickle)
    message = f"PEFT does not load {adapter.name} again beside the others: "
    with model_code(context.device, message, kinds=(KeyError,)):
        tensors = expected_adapter(model, files, adapter.name)
    return {name: tensor for name, tensor in tensors.items() if not is_made_anew(state, name, adapter.name)}


def _load_again(context: Context, model: Any) -> None:
    """Load the further adapters' files again, and record that PEFT has rounded them.

    Before version 0.19 PEFT makes the parameters of a further adapter in the dtype of the base, and widens them after
    it has loaded the file into them.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    for adapter in context.job.case.adapters[1:]:
        weights = load_peft_weights(adapter.path, device="cpu")
        set_peft_model_state_dict(model, weights, adapter_name=adapter.name)
    half = sorted({name_of(p.dtype) for p in context.base.model.parameters() if p.dtype in _WIDENED})
    if half and context.job.autocast_adapter_dtype:
        reason = (
            f"PEFT {importlib.metadata.version('peft')} rounds an adapter that it loads beside another to {half[0]}, "
            "the dtype of the base, which PEFT 0.19 does not: the files were loaded again before they were compared"
        )
        context.record.fact(STAGE, "load_adapter", "values", status="skipped", reason=reason)


def _inputs(context: Context) -> dict[str, torch.Tensor] | None:
    """Return the fixed inputs; None, with the reason recorded, where the model cannot be run on any."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    if inputs is not None and not reason and not inputs_fit(context, STAGE, inputs):
        reason = "ids or labels are past the end of a table"
    if inputs is None or reason:
        _no_results(context, reason)
        return None
    return inputs


def _no_results(context: Context, reason: str) -> None:
    context.record.fact(STAGE, WHOLE_MODEL, "results", status="skipped", reason=reason)


def _check_loaded(multi_model: MultiAdapterModel) -> None:
    """Record every tensor of every adapter, side by side in one model, against its file."""
    record, state = multi_model.context.record, multi_model.model.state_dict(keep_vars=True)
    for name, expected in multi_model.expected.items():
        for parameter, (key, tensor) in expected.items():
            layer, part = adapter_place(key)
            if not record.wants(STAGE, layer):
                continue
            actual = state.get(parameter)
            row = TensorRecord(STAGE, layer, f"{name}.{part}", rule=Rule.BITWISE, status="equal")
            if actual is None or actual.is_meta:
                record.write(
                    replace(
                        row,
                        status="missing",
                        shape=tuple(tensor.shape),
                        dtype=name_of(tensor.dtype),
                        reason="in the file, and not in the model beside the other adapters",
                    )
                )
                continue
            record.moved(row, actual=actual, expected=tensor.to(actual.dtype))


def _switch(multi_model: MultiAdapterModel) -> None:
    """Let each adapter be active alone, the first one last, so that each replaces another."""
    for name in (*multi_model.names[1:], multi_model.names[0]):
        multi_model.model.set_adapter(name)
        step = f"set_adapter({name})"
        multi_model.check_active(step, [name])
        multi_model.check_result(step, name)
    multi_model.check_bytes("set_adapter")


def _together(multi_model: MultiAdapterModel) -> None:
    """Let all adapters be active at once."""
    with multi_model.active(*multi_model.names):
        multi_model.check_active("all active", multi_model.names)
        if multi_model.inputs is not None:
            results(multi_model.model, multi_model.inputs)
    multi_model.check_result("all active", multi_model.names[0])
    multi_model.check_bytes("all active")


def _disable(multi_model: MultiAdapterModel) -> None:
    """Disable all adapters, and enable them again."""
    step = "disable_adapter"
    with multi_model.model.disable_adapter():
        multi_model.check_result(step)
    multi_model.check_result(step, multi_model.names[0])
    multi_model.check_bytes(step)


def _delete(multi_model: MultiAdapterModel) -> None:
    """Delete one adapter after the other, the last but one active, until one is left."""
    *deleted, last = multi_model.names
    for number, name in enumerate(deleted, start=1):
        step = f"delete_adapter({name})"
        multi_model.model.delete_adapter(name)
        multi_model.check_deleted(step, name)
        multi_model.check_bytes(step, multi_model.names[number:])
    multi_model.model.set_adapter(last)
    multi_model.check_result("delete_adapter", last)


_STEPS: dict[str, Callable[[MultiAdapterModel], None]] = {
    "set_adapter": _switch,
    "all active": _together,
    "disable_adapter": _disable,
    "add_weighted_adapter": combine,
    "merge": merge,
    "hotswap": hotswap,
    "delete_adapter": _delete,
}
"""Every step by the name of its row where PEFT refuses it; the last one leaves no model for another."""


def _unless_refused(multi_model: MultiAdapterModel, step: str, check: Callable[[MultiAdapterModel], None]) -> None:
    """Take a step, and record it as taken, or as refused where PEFT does not do it."""
    prefix = "PEFT does not do this with these adapters: "
    try:
        with model_code(multi_model.context.device, prefix, kinds=(*UNUSABLE, NotImplementedError)), torch.no_grad():
            check(multi_model)
        multi_model.done(step)
    except Skip as refused:
        multi_model.refused(step, str(refused))
