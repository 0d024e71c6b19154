"""Problems that workers report of themselves: failed stages, wrong digests, configs, planted faults.

The records of a failed stage are compared nevertheless. The adapter's config has facts that a run cannot check: the
base that it was trained on, and fields that PEFT ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from consistency.capture.adapter_remarks import AdapterRemark, remarks_in
from consistency.capture.json_codec import encode_json
from consistency.capture.names import (
    ANOTHER_BASE,
    DIGEST_FAULT,
    IGNORED_FIELDS,
    OLDER_LAYOUT,
    RANK_AND_SCALING,
    SETTINGS_LAYER,
    TRAINED_ON,
)
from consistency.capture.wording import size, some
from consistency.case import standard
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import BAD, Finding, Outcome, Severity, TensorComparison, rows_of
from consistency.comparison.workers import ComparedWorker, labels_of
from consistency.devices.spec import label_of
from consistency.numerics import words
from consistency.numerics.rules import Rule


def find_failed_stages(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report each error once, with the stages that are incomplete for it and the workers that met it."""
    stages_by_reason: dict[str, dict[str, None]] = {}
    labels_by_reason: dict[str, dict[str, None]] = {}
    for worker in evidence.workers:
        for stage, reason in worker.failures.items():
            stages_by_reason.setdefault(reason, {})[stage] = None
            labels_by_reason.setdefault(reason, {})[worker.label] = None
    for reason, stages in stages_by_reason.items():
        labels = tuple(labels_by_reason[reason])
        yield Finding(
            kind=kinds.FAILED_STAGE,
            severity="error",
            message=f"{some(list(stages))} · not complete on {some(labels)}: {reason}",
            workers=labels,
        )


def find_wrong_digests(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report devices that compute wrong digests.

    Their tensors are compared nevertheless: the host digests copies of them.
    """
    labels_by_reason: dict[str, list[str]] = {}
    for worker in evidence.workers:
        reason = worker.info.environment.get(DIGEST_FAULT)
        if reason:
            labels_by_reason.setdefault(str(reason), []).append(worker.label)
    for reason, labels in labels_by_reason.items():
        opening = f"{some(labels)} · digests computed on the device are wrong"
        yield Finding(
            kind=kinds.WRONG_DIGEST,
            severity="error",
            message=f"{opening}: {reason}; tensors were copied to the host and digested there",
            general=opening,
            workers=tuple(labels),
            next="test the device's integer arithmetic and its copies with the vendor's own tool",
        )


@dataclass(slots=True)
class _ConfigProblems:
    """The problems of adapter configs: the workers that found each."""

    remarks: dict[AdapterRemark, dict[str, None]] = field(default_factory=dict)
    other_bases: dict[str, dict[str, None]] = field(default_factory=dict)
    ignored_fields: dict[str, dict[str, None]] = field(default_factory=dict)
    older_layouts: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, label: str, recorded: Mapping[str, Any]) -> None:
        """Add the problems in what one worker recorded of its adapter's settings."""
        if recorded.get(TRAINED_ON):
            self.other_bases.setdefault(str(recorded[TRAINED_ON]), {})[label] = None
        if isinstance(recorded.get(IGNORED_FIELDS), list):
            names = some(list(map(str, recorded[IGNORED_FIELDS])))
            self.ignored_fields.setdefault(names, {})[label] = None
        if recorded.get(OLDER_LAYOUT):
            self.older_layouts.setdefault(str(recorded[OLDER_LAYOUT]), {})[label] = None
        for remark in remarks_in(recorded):
            self.remarks.setdefault(remark, {})[label] = None


def find_configs(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report each problem of the configs of base and adapter once, with the workers that found it."""
    yield from _different_base_configs(evidence.workers)
    problems = _ConfigProblems()
    for worker in evidence.workers:
        settings = worker.records.get((standard.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
        if settings is not None:
            problems.add(worker.label, settings.evidence)
    # workers that found the same problem share a finding: they read the same two files
    for remark, labels in problems.remarks.items():
        yield Finding(
            kind=remark.flaw,
            severity=remark.severity,
            workers=tuple(labels),
            message=f"adapter · {remark.text}",
            next=remark.next,
        )
    for base, labels in problems.other_bases.items():
        yield Finding(
            kind=kinds.OTHER_BASE,
            severity="note",
            workers=tuple(labels),
            message=f"adapter · adapter_config.json {ANOTHER_BASE}{base}; shapes that fit do not prove that this is "
            "the right base",
        )
    for names, labels in problems.ignored_fields.items():
        yield Finding(
            kind=kinds.IGNORED_FIELDS,
            severity="warning",
            workers=tuple(labels),
            message=f"adapter · PEFT ignores what it does not know of adapter_config.json: {names}",
            next="load it with the PEFT that saved it, or a later one: peft_version in adapter_config.json",
        )
    for layout, labels in problems.older_layouts.items():
        yield Finding(
            kind=kinds.OLDER_LAYOUT,
            severity="warning",
            workers=tuple(labels),
            message=f"adapter · {layout} with lora_A and lora_B the other way round, and the shapes fit this PEFT as "
            "well: it computes something else",
            next="load it with the PEFT that saved it, merge it there, and use the merged model",
        )


def _different_base_configs(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report bases whose configs differ: each worker is judged against float64 by its own, so that no row shows it."""
    groups = list(
        group_by_key((encode_json(worker.info.config), worker) for worker in compared if worker.info.config).values()
    )
    # the first group has the config that the others are compared with
    for workers in groups[1:]:
        first_worker = groups[0][0]
        differences = _config_differences(workers[0], first_worker)
        if not differences:
            continue
        labels = labels_of(workers)
        opening = f"base · {some(labels)} · another config, so another function"
        yield Finding(
            kind=kinds.SETTINGS,
            severity="error",
            workers=labels,
            message=f"{opening}: {some(differences)}",
            general=opening,
            next="capture again with one config.json: consistency diff shows what differs in the files",
        )


def _config_differences(worker: ComparedWorker, first_worker: ComparedWorker) -> list[str]:
    """Describe each field in which the configs of two workers differ.

    Another version of transformers has other fields: only those that both have are compared then.
    """
    info, first_info = worker.info, first_worker.info
    names = info.config.keys() & first_info.config.keys()
    if info.environment.get("transformers") == first_info.environment.get("transformers"):
        names = info.config.keys() | first_info.config.keys()
    differences = []
    for name in sorted(names):
        value, first_value = info.config.get(name), first_info.config.get(name)
        if value != first_value:
            differences.append(f"{name} is {value!r} and {first_value!r} on {first_worker.label}")
    return differences


_STEPS = {"import": "importing the libraries", "load base": "loading the base", "load adapter": "loading the adapter"}


@dataclass(slots=True)
class _Use:
    """Unexpected use of a device in one step: its rows by worker and counter."""

    rows: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    tensors: dict[str, None] = field(default_factory=dict)


def find_device_use(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Group unexpected device use by load path, device, step and severity."""
    load_paths = {tensor.load_path for tensor in evidence.tensors}
    for (load_path, device, step, is_error), use in _uses(evidence.tensors).items():
        workers = tuple(use.rows)
        ending = f" on load path {load_path}" if len(load_paths) > 1 else ""
        severity: Severity = "error" if is_error else "warning"
        next_step = None
        if step == "load adapter" and not is_error:
            advice = _advice(workers)
            ending += f": give {advice}"
            next_step = f"PeftModel.from_pretrained(model, adapter, {advice})"
        opening = f"memory · {some(workers)} · {_STEPS.get(step, f'the step {step}')}"
        yield Finding(
            kind=words.TOUCHED,
            severity=severity,
            message=f"{opening} {_describe_use(use, device)}{ending}",
            general=f"{opening} used {device}{ending}",
            workers=workers,
            tensors=tuple(use.tensors),
            detail=tuple(_detail(next(iter(use.rows.values())))),
            next=next_step,
        )


def _uses(tensors: Iterable[TensorComparison]) -> dict[tuple[str, str, str, bool], _Use]:
    """Return the uses by load path, device, first step of the use, and whether it is an error."""
    # the counters of one device belong together: what the allocator, NVML and the first call show of one use
    rows_by_worker: dict[tuple[str, str, str], dict[str, tuple[TensorComparison, Outcome]]] = {}
    for tensor, row in rows_of(tensor for tensor in tensors if tensor.rule == Rule.LIMIT):
        if row.word == words.TOUCHED:
            for worker in row.workers:
                rows_by_counter = rows_by_worker.setdefault((tensor.load_path, tensor.layer, worker), {})
                rows_by_counter[tensor.tensor] = (tensor, row)
    uses: dict[tuple[str, str, str, bool], _Use] = {}
    for (load_path, device, worker), rows_by_counter in rows_by_worker.items():
        rows = {counter: row for counter, (_, row) in rows_by_counter.items()}
        first_row = next(iter(rows.values()))
        is_error = any(row.status in BAD for row in rows.values())
        use = uses.setdefault((load_path, device, str(first_row.evidence.get("first_step")), is_error), _Use())
        use.rows[worker] = rows
        use.tensors.update(dict.fromkeys(tensor.name for tensor, _ in rows_by_counter.values()))
    return uses


def _describe_use(use: _Use, device: str) -> str:
    """State how much memory was allocated on a device, of the worker with most, or that nothing was."""
    # without an allocation, the context alone takes memory
    peaks = [rows["allocated"].evidence for rows in use.rows.values() if "allocated" in rows]
    if not peaks:
        return f"opened a context on {device}"
    largest_peak = max(peaks, key=lambda evidence: _number(evidence.get("peak_bytes")))
    resident_bytes = max(_number(evidence.get("resident_bytes")) for evidence in peaks)
    statement = f"allocated {as_size(largest_peak.get('peak_bytes'))} on {device}"
    if resident_bytes:
        return f"{statement}, of which {as_size(resident_bytes)} stay there"
    return f"{statement} and released it"


def _advice(workers: Sequence[str]) -> str:
    """Return the argument of PEFT that chooses the device of these workers."""
    devices = {label.device for label in map(label_of, workers) if label is not None}
    return f"torch_device='{devices.pop()}'" if len(devices) == 1 else "torch_device= the device of the base"


def _detail(rows: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the figures of each counter, and the first call that used the device."""
    for counter, row in rows.items():
        evidence = row.evidence
        parts = [counter]
        if "peak_bytes" in evidence:
            parts.append(f"{as_size(evidence['peak_bytes'])} at peak, {as_size(evidence.get('resident_bytes'))} now")
        if "used_bytes" in evidence:
            parts.append(f"{as_size(evidence['used_bytes'])} by NVML")
        if "passing_bytes" in evidence:
            parts.append(f"an adapter that passes through takes {as_size(evidence['passing_bytes'])} at most")
        yield " · ".join(parts)
    for row in rows.values():
        if "first_operation" in row.evidence:
            yield _describe_first_call(row.evidence)
            return


def _describe_first_call(evidence: Mapping[str, Any]) -> str:
    """Name the first operation on the device, with the frames that called it."""
    operation = f"first: {evidence['first_operation']}"
    frames = evidence.get("first_call")
    if isinstance(frames, (list, tuple)) and frames:
        return f"{operation} in {' from '.join(map(str, frames))}"
    return operation


def as_size(value: Any) -> str:
    """Write a number of bytes; evidence of another type is shown as it is."""
    return size(value) if isinstance(value, int) else str(value)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def find_planted(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Note planted faults, so that the report of a drill is not mistaken for one of a real fault."""
    for worker in evidence.workers:
        if worker.info.planted is not None:
            yield Finding(
                kind=kinds.PLANTED,
                severity="note",
                workers=(worker.label,),
                message=f"the fault {worker.info.planted} was planted in {worker.label} on purpose",
            )


FINDERS = (
    Finder(name="failed stages", phase=Phase.COMPLETENESS, position=3, find=find_failed_stages),
    Finder(name="wrong digests", phase=Phase.DEVICES, position=1, find=find_wrong_digests),
    Finder(name="device use", phase=Phase.STAGES, position=1, find=find_device_use),
    Finder(name="configs", phase=Phase.MODEL, position=2, find=find_configs),
    Finder(name="planted faults", phase=Phase.REMARKS, position=2, find=find_planted),
)
