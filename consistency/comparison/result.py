"""The result of a comparison as records: outcomes, classes of agreement, findings. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from consistency.capture import origin
from consistency.capture.records import WorkerFacts
from consistency.case.tolerance import Override
from consistency.comparison import kinds
from consistency.comparison.kinds import EXIT_STATUS
from consistency.comparison.kinds import Verdict as Verdict
from consistency.comparison.merging import Merging
from consistency.comparison.outcomes import NO_DIFFERENCE as NO_DIFFERENCE
from consistency.comparison.outcomes import Outcome as Outcome
from consistency.comparison.outcomes import Status as Status
from consistency.comparison.outcomes import Workers
from consistency.devices.host.facts import HostFacts

Severity = Literal["error", "warning", "note"]

_WEIGHT: dict[str, int] = {"error": 0, "warning": 1, "note": 2}

BAD: frozenset[str] = frozenset({"outside", "missing", "unexpected"})
"""Statuses that make a run inconsistent."""


class TensorComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor on all workers of a load path.

    Attributes
    ----------
    classes : tuple of tuple of str
        Workers whose bits agree, the class of the reference worker first.
    outcomes : tuple of Outcome
        The judged rows, in the order of their first workers; every worker is in one.
    workers : tuple of str
        The workers of all outcomes, in the order of the comparison.
    """

    stage: str
    load_path: str
    layer: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    classes: tuple[tuple[str, ...], ...]
    outcomes: tuple[Outcome, ...]
    workers: Workers = ()

    def __post_init__(self) -> None:
        if not self.workers:
            workers = tuple(itertools.chain.from_iterable(outcome.workers for outcome in self.outcomes))
            msgspec.structs.force_setattr(self, "workers", workers)

    @property
    def name(self) -> str:
        """Return `stage::layer.tensor`, as findings and test items name it."""
        return tensor_name(self.stage, self.layer, self.tensor)

    @property
    def is_equal(self) -> bool:
        """Whether every worker has the same bits, and every status is `equal`."""
        return len(self.classes) <= 1 and all(row.status == "equal" for row in self.outcomes)

    @property
    def is_wrong(self) -> bool:
        """Whether any worker has a mismatch."""
        return any(row.status in BAD for row in self.outcomes)

    def by_worker(self) -> Iterator[tuple[str, Outcome]]:
        """Yield each worker with its outcome; the workers of an outcome follow each other."""
        for outcome in self.outcomes:
            for worker in outcome.workers:
                yield worker, outcome

    def outcome(self, worker: str) -> Outcome | None:
        """Return the outcome of one worker alone; None where it has none."""
        for outcome in self.outcomes:
            if worker in outcome.workers:
                return outcome.of((worker,))
        return None


def rows_of(tensors: Iterable[TensorComparison]) -> Iterator[tuple[TensorComparison, Outcome]]:
    """Yield every row of some tensors, each with its tensor."""
    for tensor in tensors:
        for row in tensor.outcomes:
            yield tensor, row


class WorkerSummary(WorkerFacts, frozen=True, kw_only=True):
    """A worker as a report describes it; `device` identifies its device, whatever number that has today."""

    host: str = ""
    device: str = ""


class ArchitectureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one architecture."""

    name: str
    workers: tuple[str, ...]


class Consequence(msgspec.Struct, frozen=True, kw_only=True):
    """Mismatches in another stage that follow from a finding, and are no finding of their own."""

    stage: str
    message: str
    workers: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something to act on.

    Attributes
    ----------
    kind : str
        The word of the diagnosis, or another kind: `lost-worker`, `not-repeatable`, `same-device-type`, `inputs`, …
    severity : str
        Only an `error` makes the verdict inconsistent.
    message : str
        One sentence.
    tensors : tuple of str
        Names `stage::layer.tensor`; the tensors of its consequences come last.
    cause : str or None
        Why it is so, where that is known; the message states it too.
    consequences : tuple of Consequence
        Mismatches in other stages that follow from it.
    detail : tuple of str
        Lines such as the worst element, the signal, the stack.
    next : str or None
        The next command or action.
    state : str or None
        The digest of the bits concerned; different bits are a different finding.
    accepted : str or None
        Where a baseline accepts the finding: its original severity, when, and why.
    load_paths : tuple of str
        The load paths with mismatches.
    general : str or None
        The message without counts and layers, where it has them: equal in cases that have the cause in common.
    """

    kind: str
    severity: Severity
    message: str
    workers: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    cause: str | None = None
    consequences: tuple[Consequence, ...] = ()
    detail: tuple[str, ...] = ()
    next: str | None = None
    state: str | None = None
    accepted: str | None = None
    load_paths: tuple[str, ...] = ()
    general: str | None = None

    @property
    def stages(self) -> tuple[str, ...]:
        """Return the stages of the tensors of the finding."""
        return tuple(dict.fromkeys(name.partition("::")[0] for name in self.tensors))

    @property
    def evidence(self) -> tuple[str, ...]:
        """Return the details and the consequences of the finding, a line each."""
        return (*self.detail, *(f"leads to: {consequence.message}" for consequence in self.consequences))


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A capture that was compared: its name, when and where it was made, by which version and command."""

    name: str
    created: str
    host: str
    tool: str = ""
    command: tuple[str, ...] = ()


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first tensor, in the model's order, at which workers diverge; `within` where only the bits differ."""

    workers: tuple[str, ...]
    load_path: str
    stage: str
    layer: str
    tensor: str
    status: Status


class ComparisonFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison of captures but for the tensors: the fields that `report.json` has too.

    Attributes
    ----------
    first_divergence : tuple of Divergence
        The first mismatch of each worker.
    first_bitwise_difference : tuple of Divergence
        The first tensor of each worker that differs bitwise from the reference worker's, within tolerance or not.
    not_checked : tuple of str
        The parts that the level and the options excluded.
    checked_elsewhere : dict of str to str
        By stage, the case of the same suite that has it in place of this one; `not_checked` states this in words.
    tolerances : tuple of Override
        The user's tolerances, which replace derived bounds where they match.
    profile : str
        `pinned` or `deployed`; several of compared captures are joined by `and`.
    settings : tuple of str
        `NAME=VALUE` of each setting that the user chose on top of the profile.
    captures : tuple of str
        Folders that were compared, where they are not beside the report.
    hosts : tuple of HostFacts
        The facts of one host per capture that records them.
    created : str or None
        When the comparison was made: ISO 8601, UTC. None where it is not known.
    host, command : str, tuple of str
        The host on which the comparison was made, and the command line word by word.
    elapsed_s : float or None
        The time that the comparison took, captures included where the same command made them.
    versions : dict of str to str
        The versions of Python and of the libraries that decide results; several are joined by `, `.
    planted : tuple of str
        Faults that were planted on purpose, as `FAULT in WORKER`.
    sources : tuple of Source
        The captures, in order.
    merging : tuple of Merging
        The effect of merging the adapter on the outputs, by capture: a fact that no verdict depends on.
    """

    case: str
    dtype: str
    level: str
    load_paths: tuple[str, ...]
    verdict: Verdict
    reference: str | None
    workers: tuple[WorkerSummary, ...]
    architectures: tuple[ArchitectureGroup, ...]
    findings: tuple[Finding, ...]
    first_divergence: tuple[Divergence, ...] = ()
    first_bitwise_difference: tuple[Divergence, ...] = ()
    not_checked: tuple[str, ...] = ()
    checked_elsewhere: dict[str, str] = {}
    tolerances: tuple[Override, ...] = ()
    base: str = ""
    adapter: str | None = None
    profile: str = ""
    settings: tuple[str, ...] = ()
    simulated: bool = False
    captures: tuple[str, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    created: str | None = None
    host: str = ""
    command: tuple[str, ...] = ()
    elapsed_s: float | None = None
    versions: dict[str, str] = {}
    planted: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    merging: tuple[Merging, ...] = ()


class Comparison(ComparisonFacts, frozen=True, kw_only=True):
    """The result of a comparison of captures."""

    tensors: tuple[TensorComparison, ...]

    def __repr__(self) -> str:
        """Return verdict, first error and its first tensor in one line, which a failed assertion shows."""
        errors = [finding for finding in self.findings if finding.severity == "error"]
        parts: list[str] = [self.verdict]
        if errors:
            # pytest cuts the middle out of a line of more than 240 characters, so the tensor stands first
            parts += [*errors[0].tensors[:1], errors[0].message]
        if len(errors) > 1:
            parts.append(f"and {len(errors) - 1} more")
        return f"<Comparison {self.case}: {'; '.join(filter(None, parts))}>"

    @property
    def exit_status(self) -> int:
        """Return 0 consistent, 1 inconsistent, 3 incomplete."""
        return EXIT_STATUS[self.verdict]


def with_provenance(comparison: Comparison, elapsed_s: float | None = None) -> Comparison:
    """Return a comparison that states when, where and by which command it was made."""
    return msgspec.structs.replace(
        comparison, created=origin.now(), host=origin.host(), command=origin.command(), elapsed_s=elapsed_s
    )


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings in report order: different software first, as it may explain the others, then by severity."""
    return tuple(sorted(findings, key=_place_in_report))


def _place_in_report(finding: Finding) -> tuple[bool, int]:
    is_of_software = finding.kind == kinds.ENVIRONMENT and finding.severity != "note"
    return not is_of_software, _WEIGHT[finding.severity]


def with_unwritten(comparison: Comparison, texts: Iterable[str]) -> Comparison:
    """Return a comparison with a warning for each file, or other part of the result, that cannot be written."""
    warnings = [Finding(kind=kinds.UNWRITTEN, severity="warning", message=text) for text in texts]
    return with_findings(comparison, [*comparison.findings, *warnings]) if warnings else comparison


def with_findings(comparison: Comparison, findings: Iterable[Finding]) -> Comparison:
    """Return a comparison with these findings, in order of severity, and their verdict."""
    ordered = in_order(findings)
    verdict = verdict_of(ordered, incomplete=comparison.verdict == "incomplete")
    return msgspec.structs.replace(comparison, findings=ordered, verdict=verdict)


def verdict_of(findings: Iterable[Finding], *, incomplete: bool = False) -> Verdict:
    """Return the verdict of findings; `incomplete` where part could not be checked, whatever they are."""
    if incomplete:
        return "incomplete"
    has_error = any(finding.severity == "error" for finding in findings)
    return "inconsistent" if has_error else "consistent"


def tensor_name(stage: str, layer: str, tensor: str) -> str:
    """Return `stage::layer.tensor`."""
    return f"{stage}::{layer}.{tensor}"
