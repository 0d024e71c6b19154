"""Unexpected device use -> findings: which step caused it, how much it allocated, and how to avoid it.

Bytes that pass through another device on PEFT's default load path are a warning; bytes that stay are an error (see
`consistency.worker.memory.placement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from consistency.capture.wording import size, some
from consistency.comparison.result import BAD, Finding, Outcome, TensorComparison
from consistency.devices.spec import label_of
from consistency.numerics.rules import Rule
from consistency.numerics.words import Word

_STEPS = {"import": "importing the libraries", "load base": "loading the base", "load adapter": "loading the adapter"}


@dataclass(slots=True)
class _Use:
    """Unexpected use of a device in one step: its rows by worker and counter."""

    rows: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    tensors: dict[str, None] = field(default_factory=dict)


def find_device_use(tensors: Sequence[TensorComparison]) -> Iterable[Finding]:
    """Group unexpected device use by load path, device, step and severity."""
    by_worker: dict[tuple[str, str, str], dict[str, tuple[TensorComparison, Outcome]]] = {}
    for tensor in tensors:
        for row in tensor.outcomes if tensor.rule == Rule.LIMIT else ():
            for worker in row.workers if row.word == Word.TOUCHED else ():
                by_worker.setdefault((tensor.load_path, tensor.layer, worker), {})[tensor.tensor] = (tensor, row)
    groups: dict[tuple[str, str, str, bool], _Use] = {}
    for (load_path, device, worker), counters in by_worker.items():
        steps = [str(row.evidence.get("first_step")) for _, row in counters.values()]
        bad = any(row.status in BAD for _, row in counters.values())
        group = groups.setdefault((load_path, device, steps[0], bad), _Use())
        group.rows[worker] = {name: row for name, (_, row) in counters.items()}
        group.tensors.update(dict.fromkeys(tensor.name for tensor, _ in counters.values()))
    load_paths = {tensor.load_path for tensor in tensors}
    for (load_path, device, step, bad), group in groups.items():
        workers = tuple(group.rows)
        where = f" on load path {load_path}" if len(load_paths) > 1 else ""
        advice = _advice(workers) if step == "load adapter" and not bad else None
        opening = f"memory · {some(workers)} · {_STEPS.get(step, f'the step {step}')}"
        ending = where + (f": give {advice}" if advice else "")
        yield Finding(
            kind=Word.TOUCHED,
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
