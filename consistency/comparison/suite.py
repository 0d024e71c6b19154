"""The result of a suite, as values: what is kept of each case, and the findings that cases have in common.

A `Comparison` holds a row per tensor and worker. A suite of a hundred cases keeps of each one what a line and a finding
need; the rest is in the case's own report.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence

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
_NUMBER_OF: dict[SuiteVerdict, tuple[str, str]] = {
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
    """What a suite keeps of a case."""

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
        text = str(error)
        return cls(
            name=name,
            folder=folder,
            verdict="unchecked",
            headline=(text.splitlines() or ["no message"])[0],
            base=base,
            adapter=adapter,
            dtype=dtype,
            error=text,
            elapsed_s=elapsed_s,
        )


class SuiteFinding(Finding, frozen=True, kw_only=True):
    """A finding that one or more cases have; details, tensors and what to do next are those of the first."""

    cases: tuple[str, ...]  # names of the cases
    numbers: tuple[int, ...]  # number of the finding in the report of each of them; 0 where it has no report


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a suite found.

    Attributes
    ----------
    name : str
        Of the suite.
    created : str
        When it ended: ISO 8601, UTC.
    host, command : str, tuple of str
        Where it ran, and the command line word by word; empty where it is not known.
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
        return any(worker.simulated for case in self.cases for worker in case.workers)

    @property
    def planted(self) -> tuple[str, ...]:
        """Return the faults that were planted on purpose, a text for each."""
        found = (f.message for case in self.cases for f in case.findings if f.kind == kinds.PLANTED)
        return tuple(dict.fromkeys(text.removesuffix(" on purpose") for text in found))

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries; where cases differ they are joined, in the order of the cases."""
        found: dict[str, dict[str, None]] = {}
        for case in self.cases:
            for name, text in case.versions.items():
                found.setdefault(name, {}).update(dict.fromkeys(text.split(", ")))
        return {name: ", ".join(versions) for name, versions in found.items()}

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of all workers."""
        return tuple(dict.fromkeys(worker.name for case in self.cases for worker in case.workers))

    @property
    def not_checked(self) -> tuple[str, ...]:
        """Return what was left out in any case, but for the stages that were left to a case which has them."""
        texts = dict.fromkeys(text for case in self.cases for text in case.not_checked)
        had = {in_other_case(stage.stage, case.name) for case in self.cases for stage in case.stages}
        return tuple(text for text in texts if text not in had)

    @property
    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        total = len(self.cases)
        counts = self.counts
        if not counts:
            return "no case was checked"
        if set(counts) == {"consistent"}:
            every = {1: "the case is", 2: "both cases are"}.get(total, f"all {total} cases are")
            return f"{every} consistent"
        texts: list[str] = []
        for verdict, number in counts.items():
            of_all = f" of {counted(total, 'case')}" if not texts else ""
            texts.append(f"{number}{of_all} {_NUMBER_OF[verdict][number > 1]}")
        return listed(texts)


def worst_first(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Return cases by verdict, the worst first, otherwise in their order."""
    return sorted(cases, key=lambda case: WORST_FIRST.index(case.verdict))


def common_findings(cases: Sequence[CaseResult]) -> tuple[SuiteFinding, ...]:
    """Return the findings of all cases, one for each cause: the most severe first, then those of most cases.

    A cause is the same where kind, severity, workers and the general message are: *cuda:1 · zeros in lora_B tensors*
    is one finding, and not 57, where 57 of 100 cases have it.
    """
    same: dict[object, list[tuple[str, int, Finding]]] = {}
    for case in cases:
        seen: Counter[object] = Counter()
        numbered = [(0, finding) for finding in _of_error(case)] + list(enumerate(case.findings, start=1))
        for number, finding in numbered:
            key = (finding.kind, finding.severity, finding.workers, finding.general or finding.message)
            seen[key] += 1  # two findings of one case stay two, however alike they are in general
            same.setdefault((key, seen[key]), []).append((case.name, number, finding))
    found = []
    for members in same.values():
        names = tuple(name for name, _, _ in members)
        first = members[0][2]
        where = f"{len(names)} of {len(cases)} cases" if len(names) > 1 else f"case {names[0]}"
        is_same = all(finding.message == first.message for _, _, finding in members)
        message = first.message if is_same else first.general or first.message
        fields = msgspec.structs.asdict(first) | {"message": f"{where} · {message}", "general": None}
        found.append(SuiteFinding(**fields, cases=names, numbers=tuple(number for _, number, _ in members)))
    # what was not checked at all comes after what was found: --fail-fast leaves out most cases
    return tuple(sorted(found, key=lambda f: (_SEVERITIES.index(f.severity), f.kind == kinds.UNCHECKED, -len(f.cases))))


def _of_error(case: CaseResult) -> tuple[Finding, ...]:
    if case.error is None:
        return ()
    message, detail = f"could not be checked: {case.headline}", tuple(case.error.splitlines()[1:])
    return (Finding(kind=kinds.UNCHECKED, severity="error", message=message, detail=detail),)
