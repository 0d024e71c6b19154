"""The result of a suite as records: a short result of each case, and the findings that cases have in common.

A `Comparison` holds a row per tensor and worker. A suite of a hundred cases keeps only the fields that a line and a
finding need; all others are in the case's own report.
"""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from consistency.capture.wording import counted, listed
from consistency.case.case import in_other_case
from consistency.comparison import kinds
from consistency.comparison.kinds import EXIT_STATUS, WORST_FIRST
from consistency.comparison.kinds import SuiteVerdict as SuiteVerdict
from consistency.comparison.merging import Merging
from consistency.comparison.result import Finding, Severity, Status, WorkerSummary
from consistency.numerics.real import Real

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
_PREDICATES: dict[SuiteVerdict, tuple[str, str]] = {
    "incomplete": ("is incomplete", "are incomplete"),
    "inconsistent": ("is inconsistent", "are inconsistent"),
    "unchecked": ("could not be checked", "could not be checked"),
    "consistent": ("is consistent", "are consistent"),
}


class CaseStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a case, over all workers and load paths."""

    stage: str
    status: Status  # the worst of any tensor; `skipped` only where nothing was compared
    counts: dict[str, int]  # tensors by the worst status that they have on any worker
    # largest error/tolerance, NaN before any number; None where nothing has a tolerance
    worst_ratio: Real | None = None
    # worst_tensor, worst_worker: `stage::layer.tensor` and worker of that ratio
    worst_tensor: str | None = None
    worst_worker: str | None = None
    first_bad: str | None = None  # layer of the first tensor with a mismatch
    # the worst status by worker; on a load path other than the usual one its name is `cuda:0 (shared)`
    workers: dict[str, Status] = {}
    elapsed_s: dict[str, float] = {}  # time by the same names; that of a lost worker is not known


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The short result of a case, as a suite keeps it."""

    name: str
    folder: str  # of the case's report and captures, relative to the folder of the suite: `cases/NAME`
    verdict: SuiteVerdict
    headline: str  # the verdict in one sentence
    base: str = ""
    adapter: str | None = None
    dtype: str = ""
    level: str = ""
    # profile, settings: as in `Comparison`
    profile: str = ""
    settings: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    error: str | None = None  # why the case could not be checked: its input cannot be used
    # in the order of the case's report, with a few of their details, and of each stage one of their tensors
    findings: tuple[Finding, ...] = ()
    # numbers of the findings, from 1, that `consistency reproduce` finds a tensor for
    reproducible: tuple[int, ...] = ()
    stages: tuple[CaseStage, ...] = ()
    workers: tuple[WorkerSummary, ...] = ()  # without their environments, and without what they measured of themselves
    # not_checked, checked_elsewhere: as in `Comparison`
    not_checked: tuple[str, ...] = ()
    checked_elsewhere: dict[str, str] = {}
    ratios: dict[str, Real] = {}  # worst error/tolerance by worker
    accepted: int = 0  # findings that the baseline accepts
    # merging, versions: as in `Comparison`
    merging: tuple[Merging, ...] = ()
    versions: dict[str, str] = {}

    @classmethod
    def of_error(
        cls,
        name: str,
        folder: str,
        error: Exception,
        *,
        base: str = "",
        adapter: str | None = None,
        dtype: str = "",
        elapsed_s: float = 0.0,
    ) -> CaseResult:
        """Return the result of a case whose input cannot be used."""
        message = str(error)
        return cls(
            name=name,
            folder=folder,
            verdict="unchecked",
            headline=(message.splitlines() or ["no message"])[0],
            base=base,
            adapter=adapter,
            dtype=dtype,
            error=message,
            elapsed_s=elapsed_s,
        )


class SuiteFinding(Finding, frozen=True, kw_only=True):
    """A finding that one or more cases have, with details, tensors and next step of the first case."""

    cases: tuple[str, ...]  # names of the cases
    numbers: tuple[int, ...]  # number of the finding in the report of each of them; 0 where it has no report


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a suite.

    Attributes
    ----------
    name : str
        The name of the suite.
    created : str
        When the suite ended: ISO 8601, UTC.
    host, command : str, tuple of str
        The host on which it ran, and the command line word by word; empty where it is not known.
    unwritten : tuple of str
        Files of the suite that cannot be written, and why.
    """

    name: str
    cases: tuple[CaseResult, ...]
    elapsed_s: float
    created: str = msgspec.field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"))
    host: str = ""
    command: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()

    @property
    def verdict(self) -> SuiteVerdict:
        """Return the worst verdict of any case."""
        return min((case.verdict for case in self.cases), key=WORST_FIRST.index, default="unchecked")

    @property
    def exit_status(self) -> int:
        """Return 3 where a case is incomplete, else 1 where one is inconsistent, else 2 where one was not checked."""
        return EXIT_STATUS[self.verdict]

    @property
    def counts(self) -> dict[SuiteVerdict, int]:
        """Return the number of cases by verdict, the worst first."""
        counts = {verdict: sum(case.verdict == verdict for case in self.cases) for verdict in WORST_FIRST}
        return {verdict: count for verdict, count in counts.items() if count}

    @property
    def simulated(self) -> bool:
        return any(any(worker.simulated for worker in case.workers) for case in self.cases)

    @property
    def planted(self) -> tuple[str, ...]:
        """Return the faults that were planted on purpose, a text for each."""
        findings = itertools.chain.from_iterable(case.findings for case in self.cases)
        messages = (finding.message for finding in findings if finding.kind == kinds.PLANTED)
        return tuple(dict.fromkeys(message.removesuffix(" on purpose") for message in messages))

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries; where cases differ they are joined, in the order of the cases."""
        versions_by_name: dict[str, dict[str, None]] = {}
        for case in self.cases:
            for name, joined_versions in case.versions.items():
                versions_by_name.setdefault(name, {}).update(dict.fromkeys(joined_versions.split(", ")))
        return {name: ", ".join(versions) for name, versions in versions_by_name.items()}

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of all workers."""
        workers = itertools.chain.from_iterable(case.workers for case in self.cases)
        return tuple(dict.fromkeys(worker.name for worker in workers))

    @property
    def not_checked(self) -> tuple[str, ...]:
        """Return the parts that any case left out, but for stages that were left to a case which has them."""
        had_by_others: set[str] = set()
        for case in self.cases:
            had_by_others.update(in_other_case(stage.stage, case.name) for stage in case.stages)
        parts = dict.fromkeys(itertools.chain.from_iterable(case.not_checked for case in self.cases))
        return tuple(part for part in parts if part not in had_by_others)

    @property
    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        total = len(self.cases)
        counts = self.counts
        if not counts:
            return "no case was checked"
        if set(counts) == {"consistent"}:
            all_cases = {1: "the case is", 2: "both cases are"}.get(total, f"all {total} cases are")
            return f"{all_cases} consistent"
        clauses: list[str] = []
        for verdict, number in counts.items():
            # the first clause states the total: `2 of 5 cases are incomplete and 3 are consistent`
            of_all = f" of {counted(total, 'case')}" if not clauses else ""
            singular, plural = _PREDICATES[verdict]
            predicate = plural if number > 1 else singular
            clauses.append(f"{number}{of_all} {predicate}")
        return listed(clauses)


def worst_first(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Return cases by verdict, the worst first, otherwise in their order."""
    return sorted(cases, key=lambda case: WORST_FIRST.index(case.verdict))


def common_findings(cases: Sequence[CaseResult]) -> tuple[SuiteFinding, ...]:
    """Return the findings of all cases, one for each cause: the most severe first, then those of most cases.

    A cause is the same where kind, severity, workers and the general message are: *cuda:1 · zeros in lora_B tensors*
    is one finding, and not 57, where 57 of 100 cases have it.
    """
    occurrences: dict[object, list[_Occurrence]] = {}
    # a finding is found again by its cause, and by how often its own case has that cause before
    for case in cases:
        times: Counter[object] = Counter()
        for number, finding in _numbered_findings(case):
            cause = (finding.kind, finding.severity, finding.workers, finding.general or finding.message)
            times[cause] += 1  # two findings of one case stay two, however alike they are in general
            occurrence = _Occurrence(case=case.name, number=number, finding=finding)
            occurrences.setdefault((cause, times[cause]), []).append(occurrence)
    findings = [_common_finding(members, len(cases)) for members in occurrences.values()]
    return tuple(sorted(findings, key=_place_in_report))


class _Occurrence(NamedTuple):
    """A finding in one case, and its number in the report of the case; 0 where the case has no report."""

    case: str
    number: int
    finding: Finding


def _numbered_findings(case: CaseResult) -> Iterator[tuple[int, Finding]]:
    """Yield the findings of a case with their numbers; first, with the number 0, the one that it was not checked."""
    if case.error is not None:
        yield (
            0,
            Finding(
                kind=kinds.UNCHECKED,
                severity="error",
                message=f"could not be checked: {case.headline}",
                detail=tuple(case.error.splitlines()[1:]),
            ),
        )
    yield from enumerate(case.findings, start=1)


def _common_finding(occurrences: Sequence[_Occurrence], case_count: int) -> SuiteFinding:
    """Return one finding for the findings of several cases that have their cause in common."""
    names = tuple(occurrence.case for occurrence in occurrences)
    first = occurrences[0].finding
    where = f"{len(names)} of {case_count} cases" if len(names) > 1 else f"case {names[0]}"
    message = first.message
    if any(occurrence.finding.message != first.message for occurrence in occurrences):
        message = first.general or first.message
    fields = msgspec.structs.asdict(first) | {"message": f"{where} · {message}", "general": None}
    return SuiteFinding(**fields, cases=names, numbers=tuple(occurrence.number for occurrence in occurrences))


def _place_in_report(finding: SuiteFinding) -> tuple[int, bool, int]:
    # cases that were not checked at all come after mismatches: --fail-fast leaves out most cases
    is_unchecked = finding.kind == kinds.UNCHECKED
    return _SEVERITIES.index(finding.severity), is_unchecked, -len(finding.cases)
