"""The remark on a finding that a known fault of another library explains, and on the words of such findings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from consistency.capture.names import ADAPTER_METHOD
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.remark import Remark
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker
from consistency.extras.diagnosis.upstream.fault import Sign, UpstreamFault
from consistency.extras.diagnosis.upstream.faults import FAULTS


def _on_finding(finding: Finding, evidence: ComparisonEvidence) -> Sequence[str]:
    """Return a line for each known fault that a finding is a sign of, for all of its workers."""
    named = set(finding.workers)
    workers = [worker for worker in evidence.workers if worker.label in named]
    if not workers or any(worker.info.planted for worker in workers):
        return []  # what was planted is nobody else's fault
    return [f"known fault of {fault.sentence}" for fault in FAULTS if _explains(fault, finding, workers)]


def _explains(fault: UpstreamFault, finding: Finding, workers: Sequence[ComparedWorker]) -> bool:
    """Return whether a finding is a sign of a fault that the libraries of all of its workers have."""
    if fault.sign is None or not _shows(finding, fault.sign):
        return False
    return all(_has_version(worker, fault) and _has_model(worker, fault.sign) for worker in workers)


def _shows(finding: Finding, sign: Sign) -> bool:
    """Return whether a finding's kind, tensors, load paths and message are those of a sign."""
    if finding.kind not in sign.kinds:
        return False
    followed = {name for consequence in finding.consequences for name in consequence.tensors}
    # an explanation of a part of the tensors would hide the rest
    for name in finding.tensors:
        if name in followed:
            continue
        stage, _, tensor = name.partition("::")
        if stage != sign.stage or not re.search(sign.tensor, tensor):
            return False
    if not all(sign.load_path in path for path in finding.load_paths):
        return False
    return bool(re.search(sign.message, finding.message))


def _has_version(worker: ComparedWorker, fault: UpstreamFault) -> bool:
    """Return whether a worker's library has a version of the range in which the fault was seen."""
    version = _numbers_of(str(worker.info.environment.get(fault.library) or ""))
    oldest, newest = map(_numbers_of, fault.seen)
    return oldest <= version <= newest


def _numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers with which a version begins, without what follows them: (2, 13, 0) of `2.13.0+cpu`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _has_model(worker: ComparedWorker, sign: Sign) -> bool:
    """Return whether a worker loaded an adapter of the sign's methods onto a model of its class."""
    environment = worker.info.environment
    if sign.methods and environment.get(ADAPTER_METHOD) not in sign.methods:
        return False
    return str(environment.get("model_class") or "").startswith(sign.model_class)


def _on_word(word: str) -> Sequence[str]:
    """Return a line for each known fault whose findings have this kind."""
    return [fault.sentence for fault in FAULTS if fault.sign is not None and word in fault.sign.kinds]


REMARK = Remark(on_finding=_on_finding, on_word=_on_word)
