"""What workers ran with: software and inputs that differ between them, and settings that are not in force."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.wording import some
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.kinds import FindingKind
from consistency.comparison.outcomes import gathered
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker

_SOFTWARE = ("torch", "cuda", "hip", "cudnn", "transformers", "peft", "safetensors", "accelerate", "numpy", "python")


def find_other_software(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report different software; such captures are compared nevertheless."""
    for name in ("profile", *_SOFTWARE):
        labels_by_value: dict[str, list[str]] = {}
        for worker in evidence.workers:
            facts = {"profile": _profile_and_settings(worker), **worker.info.environment}
            if name in facts:
                labels_by_value.setdefault(str(facts[name]), []).append(worker.label)
        if len(labels_by_value) > 1:
            text = "; ".join(f"{value}: {some(labels)}" for value, labels in labels_by_value.items())
            yield Finding(kind=kinds.ENVIRONMENT, severity="warning", message=f"{name} differs between workers: {text}")


def find_other_inputs(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report workers whose model got other inputs than that of the first."""
    labels_by_digest = gathered(
        (worker.info.inputs_digest, worker.label)
        for worker in evidence.workers
        if worker.info.inputs_digest is not None
    )
    if len(labels_by_digest) < 2:
        return
    first, *others = labels_by_digest.values()
    workers = tuple(label for labels in others for label in labels)
    yield Finding(
        kind=kinds.INPUTS,
        severity="error",
        message=f"forward · {some(workers)} had different inputs than {some(first)}: outputs cannot be compared",
        workers=workers,
        next="give the same --inputs, --level, base and tokenizer to every capture",
    )


def find_settings(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report settings that changed during a run, and those that a device refused."""
    labels_by_setting: dict[tuple[FindingKind, str, str | None], list[str]] = {}
    for worker in evidence.workers:
        info = worker.info
        for change in info.changes:
            text = f"{change.setting} changed to {change.in_force} during {change.stage}"
            asked = None if change.asked is None and change.setting not in info.asked else str(change.asked)
            labels_by_setting.setdefault((kinds.SETTING_CHANGED, text, asked), []).append(worker.label)
        for name, value in info.asked.items():
            if name in info.in_force and info.in_force[name] != value:
                text = f"{name} is {info.in_force[name]}"
                key = (kinds.SETTING_REFUSED, text, str(value))
                labels_by_setting.setdefault(key, []).append(worker.label)
    for (kind, text, asked), labels in labels_by_setting.items():
        wanted = "the profile leaves it" if asked is None else f"{asked} was requested"
        yield Finding(
            kind=kind,
            severity="note" if asked is None else "warning",
            message=f"{text} on {some(labels)}; {wanted}",
            workers=tuple(labels),
        )


def _profile_and_settings(worker: ComparedWorker) -> str:
    return " ".join([worker.case.profile, *map(str, worker.case.settings)])


FINDERS = (
    Finder(name="software", phase=Phase.CONDITIONS, position=1, find=find_other_software),
    Finder(name="inputs", phase=Phase.CONDITIONS, position=2, find=find_other_inputs),
    Finder(name="settings", phase=Phase.HOSTS, position=2, find=find_settings),
)
