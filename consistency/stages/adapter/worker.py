"""Stage `adapter`: every adapter tensor on the device against the bytes in its file, read on the CPU.

PEFT's own key mapping decides which parameter a tensor of the file goes to; PEFT casts some dtypes on loading, so the
file's bytes are cast once, on the CPU, to the parameter's dtype.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from consistency.capture.adapter_remarks import REMARKS, AdapterRemark
from consistency.capture.names import RANK_AND_SCALING, SETTINGS_LAYER, adapter_place
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.capture.wording import size
from consistency.case.checkpoint import read_json
from consistency.devices.memory import available_bytes
from consistency.errors import InputError
from consistency.numerics import words
from consistency.numerics.diagnosis_moved import OtherContents
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
    state = context.model.state_dict(keep_vars=True)
    loads_by_name: dict[str, Loads] = {}
    # before the comparison, which records a later load that went wrong too
    with load_paths.skipping(context):
        if context.job.case.reloads:
            loads_by_name = reload(context, state)
    keys_by_digest = _keys_by_digest(context, state)
    # in the order of the model; tensors that it lacks come last
    place = {name: number for number, name in enumerate(state)}
    in_model_order = sorted(context.expected.items(), key=lambda item: place.get(item[0], len(place)))
    for done, (name, (key, tensor)) in enumerate(in_model_order):
        layer, part = adapter_place(key)
        if not context.record.wants("adapter", layer):
            continue
        context.events.step(f"{layer}.{part}", done, len(context.expected))
        reason_row = _row_without_tensor(state, name, (layer, part), tensor)
        if reason_row is not None:
            context.record.write(reason_row)
        else:
            loads = loads_by_name.get(name, Loads())
            _record_tensor(context, name, state[name], loads, keys_by_digest)
    missing = _record_missing(context, state)
    computed = _record_made_on_loading(context, state, missing)
    if context.record.wants("adapter", SETTINGS_LAYER):
        _record_settings(context, computed)
    load_paths.run(context, keys_by_digest)


def _keys_by_digest(context: Context, state: dict[str, Any]) -> dict[str, str]:
    """Return the keys of the file's tensors, by the digests of their bytes in the dtypes of the model."""
    keys: dict[str, str] = {}
    for name, (key, tensor) in context.expected.items():
        # PEFT loads a file in a half type as float32 unless told otherwise
        cast = tensor.to(state[name].dtype) if name in state else tensor
        keys[digest(cast).value] = key
    return keys


def _row_without_tensor(
    state: dict[str, Any], name: str, row: tuple[str, str], tensor: torch.Tensor
) -> TensorRecord | None:
    """Return the row of a tensor in the file that cannot be compared with the model's; None where it can.

    Parameters
    ----------
    name : str
        Name of the tensor in the model.
    row : tuple of str
        Layer and tensor of the row.
    tensor : torch.Tensor
        As the file has it.
    """
    if is_made_anew(state, name):
        version = importlib.metadata.version("peft")
        reason = f"PEFT {version} creates this tensor anew; PEFT 0.21 loads it from the file"
        return replace(_row(*row, tensor), status="skipped", reason=reason)
    actual = state.get(name)
    if actual is None:
        reason = "in the file, but the model has no such parameter"
        return replace(_row(*row, tensor), status="unexpected", reason=reason, evidence={"parameter": name})
    if actual.is_meta:
        reason = "on the device meta: its bytes never arrived"
        return replace(_row(*row, actual), status="missing", reason=reason)
    return None


def _record_tensor(
    context: Context, name: str, actual: torch.Tensor, loads: Loads, keys_by_digest: dict[str, str]
) -> None:
    """Compare a tensor of the model with the file's, and record it.

    Parameters
    ----------
    loads : Loads
        The results of loading the adapter again.
    keys_by_digest : dict of str to str
        As `_keys_by_digest` returns it.
    """
    key, tensor = context.expected[name]
    layer, part = adapter_place(key)
    expected = tensor.to(actual.dtype)
    expected_digest = digest(expected).value
    evidence: dict[str, Any] = {}
    if actual.dtype != tensor.dtype:
        evidence["dtype_in_file"] = name_of(tensor.dtype)
    if key == name:  # no name of the file: PEFT makes it of the file's tensors
        evidence["converted"] = "computed from the file when the adapter is loaded"
    if loads.wrong is not None and digest(actual).value == expected_digest:
        # right at first: record the result of loading again, over poison
        actual = loads.wrong
        evidence["when"] = "loaded again, over NaN"
        other_contents = OtherContents(poison=POISON[actual.element_size()])
    else:
        other_contents = OtherContents(
            initial=context.initial.get(name),
            swapped=functools.partial(file_of_another, keys_by_digest, expected_digest),
            stale=functools.partial(stale_bytes, context.base.tensors),
        )
    not_finite = count_not_finite(expected) if context.job.makes_reference else 0
    row = replace(_row(layer, part, actual), repeats=loads.digests, evidence=evidence, not_finite=not_finite)
    context.record.moved(row, actual=actual, expected=expected, other_contents=other_contents, keep=True)


def _row(layer: str, part: str, tensor: torch.Tensor) -> TensorRecord:
    """Return the row of a tensor that is as in its file."""
    return TensorRecord(
        "adapter",
        layer,
        part,
        rule=Rule.BITWISE,
        status="equal",
        shape=tuple(tensor.shape),
        dtype=name_of(tensor.dtype),
    )


def _record_missing(context: Context, state: dict[str, Any]) -> set[str]:
    """Record the adapter's parameters that its file does not hold, and so are at initialization. Return their names."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    model: Any = context.model
    config = model.peft_config[ADAPTER_NAME]
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type, "")
    parameters = dict(context.model.named_parameters())
    # a parameter that shares the memory of one in the file is loaded under that name
    loaded_addresses = {start_of(state[name]) for name in context.expected if name in state}
    missing = set()
    for name, tensor in state.items():
        is_of_adapter = f".{ADAPTER_NAME}" in name and name in parameters
        is_of_method = prefix and prefix in name
        if not is_of_adapter or not is_of_method:
            continue
        if name in context.expected or start_of(tensor) in loaded_addresses:
            continue
        missing.add(name)
        layer, part = adapter_place(name.replace(f".{ADAPTER_NAME}", ""))
        if context.record.wants("adapter", layer):
            reason = "in the model, but not in the adapter's file"
            context.record.write(replace(_row(layer, part, tensor), status="missing", reason=reason))
    return missing


def _record_made_on_loading(context: Context, state: dict[str, Any], missing: set[str]) -> list[str]:
    """Record the method's tensors that are in no file: projections and tables that are computed when it is loaded.

    Devices are compared with one another. Where these tensors differ, so do the models, and results differ by more than
    rounding explains. Return their names.
    """
    computed = []
    model, record = context.model, context.record
    recorded_addresses = context.base.addresses()
    recorded_addresses |= {start_of(state[name]) for name in (*context.expected, *missing) if name in state}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        layer, part = adapter_place(name.replace(f".{ADAPTER_NAME}", ""))
        has_strided_elements = tensor.layout is torch.strided and tensor.numel() > 0
        if tensor.is_meta and context.base.offload is not None:
            continue  # a weight of the base, which is on the host
        if not has_strided_elements or is_composite(tensor) or start_of(tensor) in recorded_addresses:
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
    """Return the remarks on the adapter itself, as evidence: empty on all workers but the one that makes references.

    `computed` names the adapter's tensors that are computed on loading.
    """
    if not context.job.makes_reference:
        return {}
    remarks = remarks_on(context.expected.values(), _config_of_file(context))
    # the weights of the base that loading changes have another name in the adapted model
    computed += [name for name, base_name in context.origins.items() if base_name in context.rewritten]
    drawn = _remark_on_draws(context, computed) if computed else None
    if drawn is not None:
        remarks.append(drawn)
    return {REMARKS: [remark.as_table() for remark in remarks]} if remarks else {}


def _config_of_file(context: Context) -> Mapping[str, Any] | None:
    """Return the table of adapter_config.json; None where PEFT makes tensors of the file's under other names."""
    case = context.job.case
    is_converted = any(key == name for name, (key, _) in context.expected.items())
    if is_converted or case.adapter is None:
        return None
    return read_json(Path(case.adapter) / "adapter_config.json")


def _remark_on_draws(context: Context, computed: list[str]) -> AdapterRemark | None:
    """Return a remark where loading draws tensors at random, by loading base and adapter a second time.

    Where there is no room for that, the reason is recorded, and None returned.
    """
    needed_bytes = sum(tensor.nbytes for tensor in context.base.tensors.values())
    free_bytes = available_bytes()
    # the peak of loading is at most the model and its largest parts again
    if free_bytes is not None and 2 * needed_bytes > free_bytes:
        reason = f"a second base takes {size(needed_bytes)}, and this host has {size(free_bytes)} left"
    else:
        try:
            return remark_on_draws(context.job.case, computed)
        except InputError as error:
            reason = f"they do not load on the CPU: {error.what}"
    reason = (
        f"base and adapter were not loaded a second time, so it is not known whether loading draws at random: {reason}"
    )
    context.record.fact("adapter", SETTINGS_LAYER, "another_seed", status="skipped", reason=reason)
    return None


def _record_settings(context: Context, computed: list[str]) -> None:
    """Record rank, scaling and active adapters, which are no tensors but change every result."""
    table = rank_and_scaling(context.model)
    inactive = inactive_layers(context.model)
    scalings_by_layer = other_scalings(context.model)
    effect, effect_evidence = effect_of(context)
    evidence: dict[str, Any] = {"layers": len(table), "values": _count_values(table), **effect_evidence}
    if scalings_by_layer:
        actual, configured = zip(*scalings_by_layer.values(), strict=True)
        evidence["got"] = dict(Counter(f"scaling {scaling:g}" for scaling in actual))
        evidence["wanted"] = dict(Counter(f"scaling {scaling:g}, by adapter_config.json," for scaling in configured))
    evidence |= stated(context)
    evidence |= _remarks(context, computed)
    word = None
    if inactive:
        evidence["inactive"] = inactive[:8]
        word = words.INACTIVE
    elif scalings_by_layer:
        word = words.SETTINGS
    # without a word it is for the other workers to judge
    status: RecordStatus = "measured" if word is None else "outside"
    row = TensorRecord(
        "adapter",
        SETTINGS_LAYER,
        RANK_AND_SCALING,
        rule=Rule.PEER,
        status=status,
        word=word,
        evidence=evidence,
        effect=effect,
    )
    # the settings as bytes of a tensor, so that workers are compared by its digest
    raw = json.dumps(table, sort_keys=True).encode()
    context.record.computed(row, torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def _count_values(table: dict[str, Any]) -> dict[str, int]:
    """Count the layers by rank and scaling."""
    return dict(Counter(f"rank {rank}, scaling {scaling}" for rank, scaling in table.values()))
