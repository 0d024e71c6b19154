"""What workers say of themselves: failed stages, wrong digests, configs of base and adapter, planted faults.

What a failed stage had recorded is compared. Of the adapter's config it is what a run cannot check: the base that it
was trained on, and fields that PEFT ignores.
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
from consistency.comparison.outcomes import gathered
from consistency.comparison.result import BAD, Finding, Outcome, TensorComparison
from consistency.comparison.workers import ComparedWorker
from consistency.devices.spec import label_of
from consistency.numerics import words
from consistency.numerics.rules import Rule


def find_failed_stages(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report each error once, with the stages that are incomplete for it and the workers that met it."""
    stages: dict[str, dict[str, None]] = {}
    workers: dict[str, dict[str, None]] = {}
    for worker in evidence.workers:
        for stage, reason in worker.failures.items():
            stages.setdefault(reason, {})[stage] = None
            workers.setdefault(reason, {})[worker.label] = None
    for reason, of_stages in stages.items():
        labels = tuple(workers[reason])
        yield Finding(
            kind=kinds.FAILED_STAGE,
            severity="error",
            message=f"{some(list(of_stages))} · not complete on {some(labels)}: {reason}",
            workers=labels,
        )


def find_wrong_digests(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report these devices. Their tensors are compared nevertheless: the host digests copies of them."""
    by_reason: dict[str, list[str]] = {}
    for p in evidence.workers:
        if reason := p.info.environment.get(DIGEST_FAULT):
            by_reason.setdefault(str(reason), []).append(p.label)
    for reason, labels in by_reason.items():
        opening = f"{some(labels)} · digests computed on the device are wrong"
        yield Finding(
            kind=kinds.WRONG_DIGEST,
            severity="error",
            message=f"{opening}: {reason}; tensors were copied to the host and digested there",
            general=opening,
            workers=tuple(labels),
            next="test the device's integer arithmetic and its copies with the vendor's own tool",
        )


def find_configs(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report each of these once, with the workers that found it."""
    yield from _of_base(evidence.workers)
    bases: dict[str, dict[str, None]] = {}
    fields: dict[str, dict[str, None]] = {}
    layouts: dict[str, dict[str, None]] = {}
    remarks: dict[AdapterRemark, dict[str, None]] = {}
    for p in evidence.workers:
        settings = p.records.get((standard.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
        recorded = {} if settings is None else settings.evidence
        if recorded.get(TRAINED_ON):
            bases.setdefault(str(recorded[TRAINED_ON]), {})[p.label] = None
        if isinstance(recorded.get(IGNORED_FIELDS), list):
            fields.setdefault(some(list(map(str, recorded[IGNORED_FIELDS]))), {})[p.label] = None
        if recorded.get(OLDER_LAYOUT):
            layouts.setdefault(str(recorded[OLDER_LAYOUT]), {})[p.label] = None
        for remark in remarks_in(recorded):
            remarks.setdefault(remark, {})[p.label] = None
    for remark, labels in remarks.items():
        yield Finding(
            kind=remark.flaw,
            severity=remark.severity,
            workers=tuple(labels),
            message=f"adapter · {remark.text}",
            next=remark.flaw.todo,
        )
    for text, labels in bases.items():
        yield Finding(
            kind=kinds.OTHER_BASE,
            severity="note",
            workers=tuple(labels),
            message=f"adapter · adapter_config.json {ANOTHER_BASE}{text}; shapes that fit prove nothing",
        )
    for text, labels in fields.items():
        yield Finding(
            kind=kinds.IGNORED_FIELDS,
            severity="warning",
            workers=tuple(labels),
            message=f"adapter · PEFT ignores what it does not know of adapter_config.json: {text}",
            next="load it with the PEFT that saved it, or a later one: peft_version in adapter_config.json",
        )
    for text, labels in layouts.items():
        yield Finding(
            kind=kinds.OLDER_LAYOUT,
            severity="warning",
            workers=tuple(labels),
            message=f"adapter · {text} with lora_A and lora_B the other way round, and the shapes fit this PEFT as "
            "well: it computes something else",
            next="load it with the PEFT that saved it, merge it there, and use the merged model",
        )


def _of_base(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report bases whose configs differ: each worker is judged against float64 by its own, so that no row shows it.

    Another version of transformers has other fields: only those that both have are compared then.
    """
    found = gathered((encode_json(p.info.config), p) for p in compared if p.info.config)
    for workers in list(found.values())[1:]:
        first, labels = next(iter(found.values()))[0], tuple(dict.fromkeys(p.label for p in workers))
        own, wanted = workers[0].info, first.info
        names = own.config.keys() & wanted.config.keys()
        if own.environment.get("transformers") == wanted.environment.get("transformers"):
            names = own.config.keys() | wanted.config.keys()
        pairs = [(name, own.config.get(name), wanted.config.get(name)) for name in sorted(names)]
        texts = [f"{name} is {a!r} and {b!r} on {first.label}" for name, a, b in pairs if a != b]
        if texts:
            yield Finding(
                kind=kinds.SETTINGS,
                severity="error",
                workers=labels,
                message=f"base · {some(labels)} · another config, so another function: {some(texts)}",
                general=f"base · {some(labels)} · another config, so another function",
                next="capture again with one config.json: consistency diff shows what differs in the files",
            )


_STEPS = {"import": "importing the libraries", "load base": "loading the base", "load adapter": "loading the adapter"}


@dataclass(slots=True)
class _Use:
    """Unexpected use of a device in one step: its rows by worker and counter."""

    rows: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    tensors: dict[str, None] = field(default_factory=dict)


def find_device_use(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Group unexpected device use by load path, device, step and severity."""
    by_worker: dict[tuple[str, str, str], dict[str, tuple[TensorComparison, Outcome]]] = {}
    for tensor in evidence.tensors:
        for row in tensor.outcomes if tensor.rule == Rule.LIMIT else ():
            for worker in row.workers if row.word == words.TOUCHED else ():
                by_worker.setdefault((tensor.load_path, tensor.layer, worker), {})[tensor.tensor] = (tensor, row)
    groups: dict[tuple[str, str, str, bool], _Use] = {}
    for (load_path, device, worker), counters in by_worker.items():
        steps = [str(row.evidence.get("first_step")) for _, row in counters.values()]
        bad = any(row.status in BAD for _, row in counters.values())
        group = groups.setdefault((load_path, device, steps[0], bad), _Use())
        group.rows[worker] = {name: row for name, (_, row) in counters.items()}
        group.tensors.update(dict.fromkeys(tensor.name for tensor, _ in counters.values()))
    load_paths = {tensor.load_path for tensor in evidence.tensors}
    for (load_path, device, step, bad), group in groups.items():
        workers = tuple(group.rows)
        where = f" on load path {load_path}" if len(load_paths) > 1 else ""
        advice = _advice(workers) if step == "load adapter" and not bad else None
        opening = f"memory · {some(workers)} · {_STEPS.get(step, f'the step {step}')}"
        ending = where + (f": give {advice}" if advice else "")
        yield Finding(
            kind=words.TOUCHED,
            severity="error" if bad else "warning",
            message=f"{opening} {_what(group, device)}{ending}",
            general=f"{opening} used {device}{ending}",
            workers=workers,
            tensors=tuple(group.tensors),
            detail=tuple(_detail(next(iter(group.rows.values())))),
            next=f"PeftModel.from_pretrained(model, adapter, {advice})" if advice else None,
        )


def _what(group: _Use, device: str) -> str:
    peaks = [rows["allocated"].evidence for rows in group.rows.values() if "allocated" in rows]
    if not peaks:
        return f"opened a context on {device}"
    most = max(peaks, key=lambda evidence: _number(evidence.get("peak_bytes")))
    kept = max(_number(evidence.get("resident_bytes")) for evidence in peaks)
    text = f"allocated {as_size(most.get('peak_bytes'))} on {device}"
    return f"{text}, of which {as_size(kept)} stay there" if kept else f"{text} and released it"


def _advice(workers: Sequence[str]) -> str:
    own = {label.device for label in map(label_of, workers) if label is not None}
    return f"torch_device='{own.pop()}'" if len(own) == 1 else "torch_device= the device of the base"


def _detail(rows: Mapping[str, Outcome]) -> Iterable[str]:
    for name, row in rows.items():
        evidence = row.evidence
        parts = [name]
        if "peak_bytes" in evidence:
            parts.append(f"{as_size(evidence['peak_bytes'])} at peak, {as_size(evidence.get('resident_bytes'))} now")
        if "used_bytes" in evidence:
            parts.append(f"{as_size(evidence['used_bytes'])} by NVML")
        if "passing_bytes" in evidence:
            parts.append(f"an adapter that passes through takes {as_size(evidence['passing_bytes'])} at most")
        yield " · ".join(parts)
    calls = next((row.evidence for row in rows.values() if "first_operation" in row.evidence), None)
    if calls is not None:
        frames = calls.get("first_call")
        yield f"first: {calls['first_operation']}" + (
            f" in {' from '.join(map(str, frames))}" if isinstance(frames, (list, tuple)) and frames else ""
        )


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
