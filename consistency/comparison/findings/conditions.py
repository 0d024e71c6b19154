"""Conditions of workers: software and inputs that differ between them, and settings that are not in force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from consistency.capture.records import WorkerInfo
from consistency.capture.wording import some
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.kinds import FindingKind
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import Finding, Severity
from consistency.comparison.tested_versions import newest_tested, release_of
from consistency.comparison.workers import ComparedWorker

_SOFTWARE = ("torch", "cuda", "hip", "cudnn", "transformers", "peft", "safetensors", "accelerate", "numpy", "python")


def find_other_software(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report different software; such captures are compared nevertheless."""
    for name in ("profile", *_SOFTWARE):
        labels_by_value: dict[str, list[str]] = {}
        for worker in evidence.workers:
            facts = {"profile": _profile_and_settings(worker), **worker.info.environment}
            # a worker that recorded no value does not differ
            if name in facts:
                labels_by_value.setdefault(str(facts[name]), []).append(worker.label)
        if len(labels_by_value) > 1:
            values = "; ".join(f"{value}: {some(labels)}" for value, labels in labels_by_value.items())
            message = f"{name} differs between workers: {values}"
            yield Finding(kind=kinds.ENVIRONMENT, severity="warning", message=message)


def find_untested_versions(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report libraries that are newer than any version with which this was tested."""
    for name, tested in newest_tested().items():
        labels_by_version: dict[str, list[str]] = {}
        for worker in evidence.workers:
            version = str(worker.info.environment.get(name) or "")
            release = release_of(version)
            if release is not None and release > tested:
                labels_by_version.setdefault(version, []).append(worker.label)
        if labels_by_version:
            versions = " and ".join(labels_by_version)
            verb = "is" if len(labels_by_version) == 1 else "are"
            yield Finding(
                kind=kinds.UNTESTED_VERSION,
                severity="note",
                message=f"{name} {versions} {verb} newer than what was tested ({tested[0]}.{tested[1]})",
                workers=tuple(itertools.chain.from_iterable(labels_by_version.values())),
            )


def find_other_inputs(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report workers whose model got other inputs than the first worker's."""
    # a worker without a digest ran no forward stage
    labels_by_digest = group_by_key(
        (worker.info.inputs_digest, worker.label)
        for worker in evidence.workers
        if worker.info.inputs_digest is not None
    )
    if len(labels_by_digest) < 2:
        return
    first_labels, *different_labels = labels_by_digest.values()
    workers = tuple(itertools.chain.from_iterable(different_labels))
    yield Finding(
        kind=kinds.INPUTS,
        severity="error",
        message=f"forward · {some(workers)} had different inputs than {some(first_labels)}: outputs cannot be compared",
        workers=workers,
        next="give the same --inputs, --level, base and tokenizer to every capture",
    )


def find_settings(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report settings that changed during a run, and those that a device refused."""
    labels_by_problem: dict[tuple[FindingKind, str, str | None], list[str]] = {}
    for worker in evidence.workers:
        # workers with one problem are one finding
        for problem in (*_changed_settings(worker.info), *_refused_settings(worker.info)):
            labels_by_problem.setdefault(problem, []).append(worker.label)
    for (kind, statement, requested), labels in labels_by_problem.items():
        severity: Severity = "warning"
        request = f"{requested} was requested"
        if requested is None:
            severity = "note"
            request = "the profile leaves it"
        yield Finding(
            kind=kind,
            severity=severity,
            message=f"{statement} on {some(labels)}; {request}",
            workers=tuple(labels),
        )


def _changed_settings(info: WorkerInfo) -> Iterator[tuple[FindingKind, str, str | None]]:
    """Yield the settings that changed, each with the requested value; None where the profile requests none."""
    for change in info.changes:
        is_requested = change.asked is not None or change.setting in info.asked
        requested = str(change.asked) if is_requested else None
        statement = f"{change.setting} changed to {change.in_force} during {change.stage}"
        yield kinds.SETTING_CHANGED, statement, requested


def _refused_settings(info: WorkerInfo) -> Iterator[tuple[FindingKind, str, str]]:
    """Yield the settings that are not in force, each with the requested value."""
    for name, value in info.asked.items():
        if name in info.in_force and info.in_force[name] != value:
            yield kinds.SETTING_REFUSED, f"{name} is {info.in_force[name]}", str(value)


def _profile_and_settings(worker: ComparedWorker) -> str:
    return " ".join([worker.case.profile, *map(str, worker.case.settings)])


FINDERS = (
    Finder(name="software", phase=Phase.CONDITIONS, position=1, find=find_other_software),
    Finder(name="inputs", phase=Phase.CONDITIONS, position=2, find=find_other_inputs),
    Finder(name="versions", phase=Phase.CONDITIONS, position=3, find=find_untested_versions),
    Finder(name="settings", phase=Phase.HOSTS, position=2, find=find_settings),
)
