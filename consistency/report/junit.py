"""A comparison as JUnit XML, for the dashboards that read it: one test case per stage and worker.

pytest's own `--junitxml` has one per tensor; this is for `consistency run`, where one run is one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

from consistency.case.load_path import LoadPath
from consistency.comparison.outcomes import Workers
from consistency.comparison.result import SKIPPED, Comparison, Finding
from consistency.comparison.suite import CaseFinding
from consistency.report.findings import findings_of
from consistency.report.formats import View
from consistency.report.sentences import command_text, not_checked_texts, profile_texts

ERRORS = frozenset({"lost-worker", "failed-worker"})
"""Kinds of findings that are errors of the workers' own test cases."""

BLOCKED = "the worker was lost before this stage"
NOT_COMPARED = "no tensor of this stage could be compared"

_ILLEGAL = {c: "�" for c in (*range(0x20), 0xFFFE, 0xFFFF) if c not in (0x9, 0xA, 0xD)}  # XML 1.0, 2.2 "Char"


def render(comparison: Comparison, view: View) -> Iterator[bytes]:
    """Yield the file."""
    suite = as_junit(comparison, elapsed_s=view.elapsed_s or 0.0, folder=view.folder)
    yield ElementTree.tostring(suite, "utf-8", xml_declaration=True)


def as_junit(comparison: Comparison, *, elapsed_s: float = 0.0, folder: str | None = None) -> ElementTree.Element:
    """Return one suite: a finding about a stage on a worker fails its case, a lost worker is an error.

    Names are the same whatever the level: a load path is named where it is not the usual one. What no test case can
    state is in the suite's output: warnings, notes, what was not checked, and the devices.
    """
    seen: dict[tuple[str, str, str], set[str]] = {}
    known: dict[tuple[object, ...], Workers] = {}
    for tensor in comparison.tensors:
        groups = [(None, tensor.workers), *((one.status, one.workers) for one in tensor.outcomes)]  # in order first
        for status, workers in groups:
            taken = (id(workers), status, tensor.load_path, tensor.stage)
            for worker in workers if taken not in known else ():
                statuses = seen.setdefault((tensor.load_path, worker, tensor.stage), set())
                if status is not None:
                    statuses.add(status)
            known[taken] = workers  # which keeps its identity
    suite = ElementTree.Element("testsuite", name=text_of(f"consistency {comparison.case}"), time=f"{elapsed_s:.3f}")
    findings = findings_of(comparison, folder)
    wrong = [finding for finding in findings if finding.severity == "error"]
    times = {
        (worker.load_path, worker.name, one.stage): one.elapsed_s
        for worker in comparison.workers for one in worker.stage_memory
    }  # fmt: skip
    told: list[Finding] = []
    for (load_path, worker, stage), statuses in seen.items():
        name = worker if load_path == LoadPath.ISOLATED else f"{worker} ({load_path})"
        about = [finding for finding in wrong if worker in finding.workers and _of(finding, stage)]
        case = add_case(suite, f"{comparison.case}.{stage}", name, times.get((load_path, worker, stage)))
        if about:
            add_result(case, "failure", about[0].message, about[0].kind, finding_lines(about))
            told += about
        elif statuses <= {"skipped"}:
            add_result(case, "skipped", NOT_COMPARED)
        elif "blocked" in statuses:
            add_result(case, "error", BLOCKED, "blocked")
    add_skipped(suite, comparison.case, ((f, stages_of(f.tensors)) for f in findings if f.kind == SKIPPED))
    for lost in (worker for worker in comparison.workers if worker.status != "ok"):
        case = add_case(suite, comparison.case, lost.name)
        about = [finding for finding in wrong if finding.kind in ERRORS and lost.name in finding.workers]
        lines = [*finding_lines(about), *([lost.stack] if lost.stack and not about else [])]
        add_result(case, "error", lost.reason or lost.status, lost.status, lines)
        told += about
    for finding in (finding for finding in wrong if finding not in told):
        case = add_case(suite, comparison.case, finding.kind)
        add_result(case, "failure", finding.message, finding.kind, finding_lines([finding]))
    if comparison.created is not None:
        suite.set("timestamp", text_of(comparison.created))
        suite.set("hostname", text_of(comparison.host))
    complete(
        suite, simulated=comparison.simulated, profile=" ".join(profile_texts(comparison)),
        planted=", ".join(comparison.planted), command=command_text(comparison.command), **comparison.versions,
    )  # fmt: skip
    devices = dict.fromkeys(f"{worker.name}: {worker.model} ({worker.architecture})" for worker in comparison.workers)
    add_output(suite, [f for f in findings if f.severity != "error"], [*not_checked_texts(comparison), *devices])
    return suite


def add_case(suite: ElementTree.Element, place: str, name: str, elapsed_s: float | None = None) -> ElementTree.Element:
    """Add a test case to a suite, with its time where that is known."""
    time = {} if elapsed_s is None else {"time": f"{elapsed_s:.3f}"}
    return ElementTree.SubElement(suite, "testcase", {"classname": text_of(place), "name": text_of(name), **time})


def add_skipped(
    suite: ElementTree.Element, case: str, skipped: Iterable[tuple[Finding | CaseFinding, Iterable[str]]]
) -> None:
    """Say why checks were skipped: in the test case of a stage that was as a whole, otherwise in one beside it.

    `skipped` are findings with their stages.
    """
    whole = {(one.get("classname"), one.get("name")): one.find("skipped") for one in suite.iter("testcase")}
    found: dict[tuple[str, str], list[str]] = {}
    for finding, stages in skipped:
        for stage in stages:
            for worker in finding.workers:
                found.setdefault((stage, worker), []).append(finding.message)
    for (stage, worker), reasons in found.items():
        place, text = f"{case}.{stage}", "; ".join(reasons)
        mark = whole.get((text_of(place), text_of(worker)))
        if mark is not None:
            mark.set("message", text_of(text))
        else:
            add_result(add_case(suite, place, f"{worker}: skipped checks"), "skipped", text)


def add_output(suite: ElementTree.Element, findings: Iterable[Finding | CaseFinding], more: Iterable[str]) -> None:
    """Add what a suite states beside its test cases."""
    lines = [f"{finding.severity}: {line}" for finding in findings for line in finding_lines([finding])]
    if lines := [*lines, *more]:
        ElementTree.SubElement(suite, "system-out").text = text_of("\n".join(lines))


def add_result(
    case: ElementTree.Element, tag: str, message: str, kind: str | None = None, lines: Iterable[str] = ()
) -> None:
    """Give a test case its `failure`, `error` or `skipped`."""
    attributes = {"message": text_of(message)} | ({} if kind is None else {"type": kind})
    found = ElementTree.SubElement(case, tag, attributes)
    found.text = text_of("\n".join(lines))


def count(element: ElementTree.Element) -> None:
    """Set the numbers of test cases, failures, errors and skipped ones within an element."""
    element.set("tests", str(len(list(element.iter("testcase")))))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(name, str(len(list(element.iter(tag)))))


def complete(suite: ElementTree.Element, *, simulated: bool, profile: str = "", **more: str) -> None:
    """Set the numbers of a suite, whether its devices are simulated, a profile other than the default, and `more`."""
    count(suite)
    facts = {"simulated": "true" if simulated else "", "profile": text_of(profile.removeprefix("profile "))}
    facts |= {name: text_of(value) for name, value in more.items()}
    if any(facts.values()):
        properties = ElementTree.Element("properties")
        for name, value in facts.items():
            if value:
                ElementTree.SubElement(properties, "property", name=name, value=value)
        suite.insert(0, properties)


def stages_of(names: Iterable[str]) -> Iterable[str]:
    """Return the stages of tensors, given as `stage::layer.tensor`."""
    return dict.fromkeys(name.partition("::")[0] for name in names)


def _of(finding: Finding, stage: str) -> bool:
    return any(name.startswith(f"{stage}::") for name in finding.tensors)


def finding_lines(findings: Iterable[Finding | CaseFinding]) -> Iterable[str]:
    """Yield findings with their evidence and what to do next."""
    for finding in findings:
        yield finding.message
        yield from (f"  {line}" for line in finding.detail)
        if finding.next:
            yield f"  next: {finding.next}"


def text_of(text: str) -> str:
    """Return text without characters that XML cannot hold."""
    return text.translate(_ILLEGAL)
