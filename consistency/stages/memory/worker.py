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
    """Record where the adapter is, which other devices were touched, and what a merge takes."""
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

    `passing_bytes` limits what is allocated there and released again, as PEFT's default loading does on device 0.
    """
    if any(found.figures(device).allocated for device in found.others):
        gc.collect()  # a loader's reference cycle is not a leak
    found.look("memory")
    for device in found.others:
        if record.wants("memory", str(device)):
            _allocations(record, found, device, passing_bytes)
            _context(record, found, device)


def _allocations(record: Recorder, found: Placement, device: torch.device, passing_bytes: int) -> None:
    figures = found.figures(device)
    is_gone = not figures.allocated
    share = ratio(figures.peak_allocated or 0, passing_bytes)
    passed_through = is_gone and passes(share)
    for counter, peak, now in (
        ("allocated", figures.peak_allocated, figures.allocated),
        ("reserved", figures.peak_reserved, figures.reserved),
    ):
        if peak is None:
            reason = f"torch.{device.type} counts no peak of {counter} bytes"
            record.fact("memory", str(device), counter, status="skipped", reason=reason)
            continue
        evidence: dict[str, Any] = {"peak_bytes": peak, "resident_bytes": now}
        status: RecordStatus = "equal"
        if peak:
            # the allocator keeps its segments, so reserved bytes mean no more than allocated ones
            status = "within" if passed_through else "outside"
            evidence.update(_when(found, device, counter), passing_bytes=passing_bytes)
        record.fact(
            "memory",
            str(device),
            counter,
            status=status,
            word=words.TOUCHED if peak else None,
            share=share if peak and counter == "allocated" and is_gone else None,
            evidence=evidence,
        )


def _context(record: Recorder, found: Placement, device: torch.device) -> None:
    seen = found.context(device)
    if seen.exists is None:
        record.fact("memory", str(device), "context", status="skipped", reason=seen.reason)
        return
    evidence: dict[str, Any] = {"seen_by": seen.seen_by}
    if seen.used_bytes is not None:
        evidence["used_bytes"] = seen.used_bytes
    if seen.exists:
        evidence.update(_when(found, device, "context"))
    # a context stays until the process ends, with or without bytes, which have rows of their own
    status: RecordStatus = "within" if seen.exists else "equal"
    word = words.TOUCHED if seen.exists else None
    record.fact("memory", str(device), "context", status=status, word=word, evidence=evidence)


def _when(found: Placement, device: torch.device, counter: str) -> dict[str, Any]:
    evidence: dict[str, Any] = {"first_step": found.first_step(device, counter)}
    call = found.calls.get(device)
    if call is not None and evidence["first_step"] == "load adapter":
        evidence.update(first_operation=call.operation, first_call=list(call.frames))
    return evidence


def placement(context: Context) -> None:
    """Record, per adapted layer, the devices of the adapter's tensors; a tensor on `meta` was never loaded."""
    where: dict[str, dict[str, str]] = {}
    state = context.model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if name in context.expected or f".{ADAPTER_NAME}" in name:
            layer, part = adapter_place(name.replace(f".{ADAPTER_NAME}", ""))
            where.setdefault(layer, {})[part] = str(tensor.device)
    own = str(context.device)
    for layer, parts in where.items():
        if not context.record.wants("memory", layer):
            continue
        wrong = {part: device for part, device in parts.items() if device != own}
        context.record.fact(
            "memory",
            layer,
            PLACEMENT,
            status="outside" if wrong else "equal",
            word=WRONG_DEVICE if wrong else None,
            evidence={"got": wrong, "wanted": own} if wrong else {"devices": sorted(set(parts.values()))},
        )


def _merge_peaks(context: Context) -> None:
    """Measure the peak of merging the largest adapted layer; at the level `thorough`, of every one.

    Where no limit is derived for that one, as for fused experts, also the largest of those that have one.
    """
    offloaded = context.base.offload is not None
    layers = [(n, layer) for n, layer in adapted_layers(context.model) if offloaded or not weight_of(layer).is_meta]
    if not layers:
        return
    if context.job.case.level is not Level.THOROUGH:
        judged = [item for item in layers if is_plain(item[1])]
        largest = (max(some, key=lambda item: weight_of(item[1]).nbytes) for some in (layers, judged) if some)
        layers = list(dict.fromkeys(largest))
    meter = meter_of(context.device, before_reset=context.memory.keep)
    model_bytes = sum(tensor.nbytes for tensor in context.base.tensors.values())
    for done, (name, layer) in enumerate(layers):
        place = module_place(name)
        if context.record.wants("memory", place):
            context.events.step(place, done, len(layers))
            with context.base.onload(layer):
                for safe in (False, True):
                    _merge_peak(context, place, layer, meter, safe=safe, model_bytes=model_bytes)


def _merge_peak(
    context: Context, place: str, layer: Any, meter: PeakMeter | None, *, safe: bool, model_bytes: int
) -> None:
    fact = functools.partial(context.record.fact, "memory", place, SAFE_MERGE_PEAK if safe else MERGE_PEAK)
    if meter is None:
        fact(status="skipped", reason=f"torch.{context.device.type} counts no peak of allocated bytes")
        return
    context.memory.keep()
    before = resident_bytes() if reset_peak() else None
    try:
        with model_code(context.device, "PEFT does not merge this layer: ", kinds=NO_MERGE):
            found = measure_merge(layer, meter, safe=safe)
    except Skip as refused:
        fact(status="skipped", reason=str(refused))
        return
    evidence = _figures(found, layer_bytes=weight_of(layer).nbytes, model_bytes=model_bytes)
    if before is not None and context.device.type == "cpu":
        evidence["process_peak_bytes"] = peak_bytes() - before
    if found.share is None:
        reason = f"the peak of a merge of {_kind(layer)} is reported, not judged: no limit is derived for it"
        fact(status="skipped", evidence=evidence, reason=reason)
    elif passes(found.share):
        fact(status="within", share=found.share, evidence=evidence)
    else:
        fact(status="outside", word=THIRD_COPY, share=found.share, evidence=evidence)


def _figures(found: MergePeak, *, layer_bytes: int, model_bytes: int) -> dict[str, Any]:
    evidence: dict[str, Any] = {
        "peak_bytes": found.seen.whole,
        "layers": round(found.seen.whole / layer_bytes, 3),
        "models": round(found.seen.whole / model_bytes, 6),
        "computing_peak_bytes": found.seen.before_mark,
        "adding_peak_bytes": found.seen.after_mark,
        "kept_bytes": found.seen.kept,
        "layer_bytes": layer_bytes,
        "model_bytes": model_bytes,
    }
    if found.allowed is not None:
        evidence.update(adding_allowed_bytes=found.allowed.after_mark, kept_allowed_bytes=found.allowed.kept)
    return evidence


def _kind(layer: Any) -> str:
    """Name a layer's kind as PEFT does: `lora.Linear`, with the variant of its merge."""
    tuner = type(layer).__module__.removeprefix("peft.tuners.").partition(".")[0]
    variant = getattr(layer, "lora_variant", {}).get(ADAPTER_NAME)
    return f"{tuner}.{type(layer).__name__}" + ("" if variant is None else f" with {type(variant).__name__}")
