"""Stage `adapter`: every adapter tensor on the device against the bytes in its file, read on the CPU.

PEFT's own key mapping decides which parameter a tensor of the file goes to; PEFT casts some dtypes on loading, so the
file's bytes are cast once, on the CPU, to the parameter's dtype.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections import Counter
from typing import Any

import torch
from msgspec.structs import replace

from consistency.capture.adapter_remarks import REMARKS, AdapterRemark
from consistency.capture.names import RANK_AND_SCALING, SETTINGS_LAYER, adapter_place
from consistency.capture.records import TensorRecord
from consistency.capture.wording import size
from consistency.devices.memory import available_bytes
from consistency.errors import InputError
from consistency.numerics import words
from consistency.numerics.diagnosis_moved import Known
from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of
from consistency.numerics.identity import start_of
from consistency.numerics.not_finite import count_not_finite
from consistency.numerics.rules import Rule
from consistency.stages.adapter import load_paths
from consistency.stages.adapter.effect import effect_of
from consistency.stages.adapter.load_paths import Loads, file_of_another, reload, stale_bytes
from consistency.stages.adapter.stated import stated
from consistency.worker.context import Context
from consistency.worker.model.adapter_settings import inactive_layers, other_scalings, rank_and_scaling
from consistency.worker.model.drawn_on_loading import remark_on_draws
from consistency.worker.model.expected_adapter import is_made_anew
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.poison import POISON
from consistency.worker.model.saved_adapter.loaded import remarks_on
from consistency.worker.quantized.held import is_composite


def run(context: Context) -> None:
    """Record the adapter tensor by tensor, its settings, and its alternative load paths."""
    model, record = context.model, context.record
    state = model.state_dict(keep_vars=True)
    again: dict[str, Loads] = {}
    with load_paths.skipping(context):
        again = reload(context, state) if context.job.case.reloads else {}
    # PEFT loads a file in a half type as float32 unless told otherwise
    by_digest = {
        digest(tensor if name not in state else tensor.to(state[name].dtype)).value: key
        for name, (key, tensor) in context.expected.items()
    }
    place = {name: number for number, name in enumerate(state)}
    in_model_order = sorted(context.expected.items(), key=lambda item: place.get(item[0], len(place)))
    for done, (name, (key, tensor)) in enumerate(in_model_order):
        layer, part = adapter_place(key)
        if not record.wants("adapter", layer):
            continue
        context.events.step(f"{layer}.{part}", done, len(context.expected))
        actual = state.get(name)
        if is_made_anew(state, name):
            version = importlib.metadata.version("peft")
            reason = f"PEFT {version} makes this tensor anew and does not load the file's, as PEFT 0.21 does"
            record.write(replace(_row(layer, part, tensor), status="skipped", reason=reason))
            continue
        if actual is None:
            reason = "in the file, but the model has no such parameter"
            row = replace(_row(layer, part, tensor), status="unexpected", reason=reason, evidence={"parameter": name})
            record.write(row)
            continue
        if actual.is_meta:
            reason = "on the device meta: its bytes never arrived"
            record.write(replace(_row(layer, part, actual), status="missing", reason=reason))
            continue
        expected = tensor.to(actual.dtype)
        own = digest(expected).value
        evidence = {} if actual.dtype == tensor.dtype else {"dtype_in_file": name_of(tensor.dtype)}
        if key == name:  # no name of the file: PEFT makes it of the file's tensors
            evidence["converted"] = "computed from the file when the adapter is loaded"
        loads = again.get(name, Loads())
        if loads.wrong is not None and digest(actual).value == own:
            # right at first: record the result of loading again, over poison
            actual, evidence = loads.wrong, {**evidence, "when": "loaded again, over NaN"}
            known = Known(poison=POISON[actual.element_size()])
        else:
            known = Known(
                initial=context.initial.get(name),
                swapped=functools.partial(file_of_another, by_digest, own),
                stale=functools.partial(stale_bytes, context.base.tensors),
            )
        not_finite = count_not_finite(expected) if context.job.makes_reference else 0
        row = replace(_row(layer, part, actual), repeats=loads.digests, evidence=evidence, not_finite=not_finite)
        record.moved(row, actual=actual, expected=expected, known=known, keep=True)
    missing = _missing(context, state)
    computed = _made_on_loading(context, state, missing)
    if record.wants("adapter", SETTINGS_LAYER):
        _settings(context, computed)
    load_paths.run(context, by_digest)


def _row(layer: str, part: str, tensor: torch.Tensor) -> TensorRecord:
    return TensorRecord(
        "adapter",
        layer,
        part,
        rule=Rule.BITWISE,
        status="equal",
        shape=tuple(tensor.shape),
        dtype=name_of(tensor.dtype),
    )


def _missing(context: Context, state: dict[str, Any]) -> set[str]:
    """Record the adapter's parameters that its file does not hold, and so are at initialization. Return their names."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    model: Any = context.model
    config = model.peft_config[ADAPTER_NAME]
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type, "")
    parameters = dict(context.model.named_parameters())
    shared = {start_of(state[name]) for name in context.expected if name in state}
    found = set()
    for name, tensor in state.items():
        in_adapter = prefix and prefix in name and f".{ADAPTER_NAME}" in name and name in parameters
        if not in_adapter or name in context.expected or start_of(tensor) in shared:
            continue
        found.add(name)
        layer, part = adapter_place(name.replace(f".{ADAPTER_NAME}", ""))
        if context.record.wants("adapter", layer):
            reason = "in the model, but not in the adapter's file"
            context.record.write(replace(_row(layer, part, tensor), status="missing", reason=reason))
    return found


def _made_on_loading(context: Context, state: dict[str, Any], missing: set[str]) -> list[str]:
    """Record the method's tensors that are in no file: projections and tables that are computed when it is loaded.

    Devices are compared with one another. Where these tensors differ, so do the models, and results differ by more than
    rounding explains. Return their names.
    """
    computed = []
    model, record = context.model, context.record
    known = context.base.addresses()
    known |= {start_of(state[name]) for name in (*context.expected, *missing) if name in state}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        layer, part = adapter_place(name.replace(f".{ADAPTER_NAME}", ""))
        strided = tensor.layout is torch.strided and tensor.numel() > 0
        if tensor.is_meta and context.base.offload is not None:
            continue  # a weight of the base, which is on the host
        if not strided or is_composite(tensor) or start_of(tensor) in known:
            continue
        computed.append(name)
        if not record.wants("adapter", layer):
            continue
        record.computed(
            TensorRecord(
                "adapter",
                layer,
                part,
                rule=Rule.PEER,
                status="measured",
                word=words.RECOMPUTED,
                blob=record.keep_small(tensor),
                evidence={"not_in_file": "computed when the adapter is loaded"},
            ),
            tensor,
        )
    return computed


def _remarks(context: Context, computed: list[str]) -> dict[str, Any]:
    """Return what is wrong with the adapter itself, as evidence: of the worker that computes references alone."""
    if not context.job.makes_reference:
        return {}
    remarks = remarks_on(context.expected.values())
    # the weights of the base that loading changes have another name in the adapted model
    computed += [name for name, own in context.origins.items() if own in context.rewritten]
    drawn = _drawn(context, computed) if computed else None
    if drawn is not None:
        remarks.append(drawn)
    return {REMARKS: [remark.as_table() for remark in remarks]} if remarks else {}


def _drawn(context: Context, computed: list[str]) -> AdapterRemark | None:
    """Return whether loading draws what it computes, which takes a second base; say why where that is not possible."""
    needed = sum(tensor.nbytes for tensor in context.base.tensors.values())
    left = available_bytes()
    reason = ""
    if left is not None and 2 * needed > left:  # the peak of loading is at most the model and its largest parts again
        reason = f"a second base takes {size(needed)}, and this host has {size(left)} left"
    else:
        try:
            return remark_on_draws(context.job.case, computed)
        except InputError as error:
            reason = f"they do not load on the CPU: {error.what}"
    reason = f"whether loading draws at random is not known, as base and adapter were not loaded again: {reason}"
    context.record.fact("adapter", SETTINGS_LAYER, "another_seed", status="skipped", reason=reason)
    return None


def _settings(context: Context, computed: list[str]) -> None:
    """Record rank, scaling and active adapters, which are no tensors but change every result."""
    table = rank_and_scaling(context.model)
    inactive = inactive_layers(context.model)
    other = other_scalings(context.model)
    effect, why = effect_of(context)
    if other:
        own, asked = zip(*other.values(), strict=True)
        why["got"] = dict(Counter(f"scaling {one:g}" for one in own))
        why["wanted"] = dict(Counter(f"scaling {one:g}, by adapter_config.json," for one in asked))
    raw = json.dumps(table, sort_keys=True).encode()
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    row = TensorRecord(
        "adapter",
        SETTINGS_LAYER,
        RANK_AND_SCALING,
        rule=Rule.PEER,
        status="outside" if inactive or other else "measured",
        word=words.INACTIVE if inactive else words.SETTINGS if other else None,
        evidence={
            "layers": len(table),
            "values": _counted(table),
            **why,
            **stated(context),
            **_remarks(context, computed),
            **({"inactive": inactive[:8]} if inactive else {}),
        },
        effect=effect,
    )
    context.record.computed(row, tensor)


def _counted(table: dict[str, Any]) -> dict[str, int]:
    """Count the layers by rank and scaling."""
    return dict(Counter(f"rank {rank}, scaling {scaling}" for rank, scaling in table.values()))
