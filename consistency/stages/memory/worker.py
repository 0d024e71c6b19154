"""Stage `memory`: unexpected device use, the placement of the adapter's tensors, and the peak of a merge.

Its rows are facts with a limit, not tensors. `devices` needs neither base nor adapter.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from consistency.capture.names import MERGE_PEAK, PLACEMENT, SAFE_MERGE_PEAK, adapter_place, module_place
from consistency.capture.records import RecordStatus
from consistency.case.stage import Level
from consistency.numerics import words
from consistency.numerics.rules import passes, ratio
from consistency.stages.memory.spec import THIRD_COPY, WRONG_DEVICE
from consistency.worker.context import Context, Machine
from consistency.worker.memory.host_memory import peak_bytes, reset_peak, resident_bytes
from consistency.worker.memory.merge_peak import MergePeak, is_plain, measure_merge
from consistency.worker.memory.peak import PeakMeter, meter_of
from consistency.worker.memory.placement import Placement
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import NO_MERGE, adapted_layers, weight_of
from consistency.worker.model.running import model_code
from consistency.worker.recorder import Recorder, Skip

ALLOCATOR_BLOCK_BYTES = 512
"""Granularity of torch's CUDA allocator (`kMinBlockSize` in c10/cuda/CUDACachingAllocator.cpp)."""


def run(context: Machine) -> None:
    """Record where the adapter is, which other devices were touched, and the peak of a merge."""
    # a worker without a base and an adapter
    if not isinstance(context, Context):
        devices(context.record, context.placement)
        return
    if context.job.case.adapter is not None:
        placement(context)
    devices(context.record, context.placement, passing_bytes=_passing_bytes(context))
    if context.job.case.adapter is not None:
        _merge_peaks(context)


def _passing_bytes(context: Context) -> int:
    """Return the memory that PEFT's default load path takes on device 0: twice the adapter's file.

    A tensor that is converted (cast, transposed, fused) exists in its old and its new form at the same time.
    """
    tensors = [tensor for _, tensor in context.expected.values()]
    return 2 * sum(tensor.nbytes + ALLOCATOR_BLOCK_BYTES for tensor in tensors)


def devices(record: Recorder, found: Placement, *, passing_bytes: int = 0) -> None:
    """Record this process's use of every other device, and the step in which it began.

    Parameters
    ----------
    found : Placement
        Notes what this process does on which device.
    passing_bytes : int
        Limit of the memory that is allocated there and released again, as PEFT's default loading does on device 0.
    """
    if any(found.figures(device).allocated for device in found.others):
        gc.collect()  # a loader's reference cycle is not a leak
    found.look("memory")
    for device in found.others:
        if record.wants("memory", str(device)):
            _record_allocations(record, found, device, passing_bytes)
            _record_context(record, found, device)


def _record_allocations(record: Recorder, placement: Placement, device: torch.device, passing_bytes: int) -> None:
    """Record peak and present bytes on another device, allocated and reserved."""
    figures = placement.figures(device)
    is_released = not figures.allocated
    passing_ratio = ratio(figures.peak_allocated or 0, passing_bytes)
    passed_through = is_released and passes(passing_ratio)
    for counter, peak, now in (
        ("allocated", figures.peak_allocated, figures.allocated),
        ("reserved", figures.peak_reserved, figures.reserved),
    ):
        if peak is None:
            reason = f"torch.{device.type} counts no peak of {counter} bytes"
            record.fact("memory", str(device), counter, status="skipped", reason=reason)
            continue
        evidence: dict[str, Any] = {"peak_bytes": peak, "resident_bytes": now}
        if not peak:
            record.fact("memory", str(device), counter, status="equal", evidence=evidence)
            continue
        evidence.update(_first_use(placement, device, counter), passing_bytes=passing_bytes)
        # the allocator keeps its segments, so reserved bytes mean no more than allocated ones
        status: RecordStatus = "within" if passed_through else "outside"
        # bytes that stay have no limit to be a ratio of
        limit_ratio = passing_ratio if counter == "allocated" and is_released else None
        record.fact(
            "memory", str(device), counter, status=status, word=words.TOUCHED, ratio=limit_ratio, evidence=evidence
        )


def _record_context(record: Recorder, placement: Placement, device: torch.device) -> None:
    """Record whether this process has a context of the driver on another device."""
    context = placement.context(device)
    if context.exists is None:
        record.fact("memory", str(device), "context", status="skipped", reason=context.reason)
        return
    evidence: dict[str, Any] = {"seen_by": context.seen_by}
    if context.used_bytes is not None:
        evidence["used_bytes"] = context.used_bytes
    if context.exists:
        evidence.update(_first_use(placement, device, "context"))
    # a context stays until the process ends, with or without bytes, which have rows of their own
    status: RecordStatus = "within" if context.exists else "equal"
    word = words.TOUCHED if context.exists else None
    record.fact("memory", str(device), "context", status=status, word=word, evidence=evidence)


def _first_use(placement: Placement, device: torch.device, counter: str) -> dict[str, Any]:
    """Return the step in which the use of a device began, and the call where loading the adapter began it."""
    evidence: dict[str, Any] = {"first_step": placement.first_step(device, counter)}
    call = placement.calls.get(device)
    if call is not None and evidence["first_step"] == "load adapter":
        evidence.update(first_operation=call.operation, first_call=list(call.frames))
    return evidence


def placement(context: Context) -> None:
    """Record, per adapted layer, the devices of the adapter's tensors; a tensor on `meta` was never loaded."""
    devices_by_layer: dict[str, dict[str, str]] = {}
    state = context.model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if name in context.expected or f".{ADAPTER_NAME}" in name:
            layer, part = adapter_place(name.replace(f".{ADAPTER_NAME}", ""))
            devices_by_layer.setdefault(layer, {})[part] = str(tensor.device)
    own_device = str(context.device)
    fact = context.record.fact
    for layer, devices_by_part in devices_by_layer.items():
        if not context.record.wants("memory", layer):
            continue
        wrong = {part: device for part, device in devices_by_part.items() if device != own_device}
        if wrong:
            evidence: dict[str, Any] = {"got": wrong, "wanted": own_device}
            fact("memory", layer, PLACEMENT, status="outside", word=WRONG_DEVICE, evidence=evidence)
        else:
            evidence = {"devices": sorted(set(devices_by_part.values()))}
            fact("memory", layer, PLACEMENT, status="equal", evidence=evidence)


def _merge_peaks(context: Context) -> None:
    """Measure the peak of merging the largest adapted layer; at the level `thorough`, of every adapted layer."""
    is_offloaded = context.base.offload is not None
    layers = [
        (name, layer)
        for name, layer in adapted_layers(context.model)
        if is_offloaded or not weight_of(layer).is_meta  # an offloaded weight is brought to the device
    ]
    if not layers:
        return
    if context.job.case.level is not Level.THOROUGH:
        layers = _largest_layers(layers)
    meter = meter_of(context.device, before_reset=context.memory.keep)
    model_bytes = sum(tensor.nbytes for tensor in context.base.tensors.values())
    for done, (name, layer) in enumerate(layers):
        place = module_place(name)
        if context.record.wants("memory", place):
            context.events.step(place, done, len(layers))
            with context.base.onload(layer):
                for safe in (False, True):
                    _merge_peak(context, place, layer, meter, safe=safe, model_bytes=model_bytes)


def _largest_layers(layers: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the largest of some layers, by name.

    Where no limit is derived for it, as for fused experts, also the largest of those that have one.
    """

    def weight_bytes(item: tuple[str, Any]) -> int:
        _, layer = item
        return weight_of(layer).nbytes

    largest = [max(layers, key=weight_bytes)]
    with_limit = [(name, layer) for name, layer in layers if is_plain(layer)]
    if with_limit:
        largest.append(max(with_limit, key=weight_bytes))
    return list(dict.fromkeys(largest))


def _merge_peak(
    context: Context, place: str, layer: Any, meter: PeakMeter | None, *, safe: bool, model_bytes: int
) -> None:
    """Merge a layer, and record the peak of its memory against the limit that is derived for its kind."""
    tensor = SAFE_MERGE_PEAK if safe else MERGE_PEAK
    fact = functools.partial(context.record.fact, "memory", place, tensor)
    if meter is None:
        fact(status="skipped", reason=f"torch.{context.device.type} counts no peak of allocated bytes")
        return
    context.memory.keep()  # the peak of the run so far, which is reset next
    # None where the system does not reset the peak of a process
    before = resident_bytes() if reset_peak() else None
    try:
        with model_code(context.device, "PEFT does not merge this layer: ", kinds=NO_MERGE):
            peak = measure_merge(layer, meter, safe=safe)
    except Skip as refused:
        fact(status="skipped", reason=str(refused))
        return
    evidence = _figures(peak, layer_bytes=weight_of(layer).nbytes, model_bytes=model_bytes)
    if before is not None and context.device.type == "cpu":
        evidence["process_peak_bytes"] = peak_bytes() - before
    if peak.share is None:
        reason = f"the peak of a merge of {_kind(layer)} is reported, not judged: no limit is derived for it"
        fact(status="skipped", evidence=evidence, reason=reason)
    elif passes(peak.share):
        fact(status="within", ratio=peak.share, evidence=evidence)
    else:
        fact(status="outside", word=THIRD_COPY, ratio=peak.share, evidence=evidence)


def _figures(peak: MergePeak, *, layer_bytes: int, model_bytes: int) -> dict[str, Any]:
    """Return the memory of a merge as evidence, in bytes, layers and models."""
    measured = peak.seen
    evidence: dict[str, Any] = {
        "peak_bytes": measured.whole,
        "layers": round(measured.whole / layer_bytes, 3),
        "models": round(measured.whole / model_bytes, 6),
        "computing_peak_bytes": measured.before_mark,
        "adding_peak_bytes": measured.after_mark,
        "kept_bytes": measured.kept,
        "layer_bytes": layer_bytes,
        "model_bytes": model_bytes,
    }
    if peak.allowed is not None:
        evidence.update(adding_allowed_bytes=peak.allowed.after_mark, kept_allowed_bytes=peak.allowed.kept)
    return evidence


def _kind(layer: Any) -> str:
    """Name a layer's kind as PEFT does: `lora.Linear`, with the variant of its merge."""
    tuner = type(layer).__module__.removeprefix("peft.tuners.").partition(".")[0]
    kind = f"{tuner}.{type(layer).__name__}"
    variant = getattr(layer, "lora_variant", {}).get(ADAPTER_NAME)
    return kind if variant is None else f"{kind} with {type(variant).__name__}"
