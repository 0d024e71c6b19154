"""A run or a suite as JUnit XML, for the dashboards that read it: one test case per stage and worker.

pytest's own `--junitxml` has one per tensor; this is for `consistency run`, where one run is one file. In the file of a
suite each case is a test suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.etree import ElementTree

from consistency.comparison import kinds
from consistency.comparison.result import Comparison, Finding
from consistency.comparison.suite import CaseResult, SuiteResult
from consistency.report.findings import findings_of
from consistency.report.formats import View
from consistency.report.sentences import command_text, has_own_settings
from consistency.report.summarize import summarize, without_load_path

_ERRORS = frozenset({kinds.LOST_WORKER, kinds.FAILED_WORKER})
"""Kinds of findings that are errors of the workers' own test cases."""

_BLOCKED = "the worker was lost before this stage"
_NOT_COMPARED = "no tensor of this stage could be compared"

_ILLEGAL = {c: "�" for c in (*range(0x20), 0xFFFE, 0xFFFF) if c not in (0x9, 0xA, 0xD)}  # XML 1.0, 2.2 "Char"


def render(found: Comparison | SuiteResult, view: View) -> Iterator[bytes]:
    """Yield the file."""
    if isinstance(found, SuiteResult):
        root = suite_as_junit(found)
    else:
        root = as_junit(found, elapsed_s=view.elapsed_s or 0.0, folder=view.folder)
    yield ElementTree.tostring(root, "utf-8", xml_declaration=True)


def as_junit(comparison: Comparison, *, elapsed_s: float = 0.0, folder: str | None = None) -> ElementTree.Element:
    """Return one test suite: a finding about a stage on a worker fails its case, a lost worker is an error.

    Names are the same whatever the level: a load path is named where it is not the usual one. What no test case can
    state is in the suite's output: warnings, notes, what was not checked, and the devices.
    """
    case = summarize(comparison.case, "", comparison, elapsed_s)
    suite = _suite(
        case,
        findings_of(comparison, folder),
        simulated="true" if comparison.simulated else "",
        planted=", ".join(comparison.planted),
        command=command_text(comparison.command),
        **comparison.versions,
    )
    if comparison.created is not None:
        suite.set("timestamp", _text(comparison.created))
        suite.set("hostname", _text(comparison.host))
    return suite


def suite_as_junit(suite: SuiteResult) -> ElementTree.Element:
    """Return one test suite per case; a case whose input cannot be used is an error."""
    name = _text(f"consistency {suite.name}")
    root = ElementTree.Element("testsuites", name=name, time=f"{suite.elapsed_s:.3f}")
    root.extend(_suite(case, case.findings) for case in suite.cases)
    _count(root)
    return root


def _suite(case: CaseResult, findings: Sequence[Finding], **properties: str) -> ElementTree.Element:
    name = _text(f"consistency {case.name}")
    suite = ElementTree.Element("testsuite", name=name, time=f"{case.elapsed_s:.3f}")
    wrong = [finding for finding in findings if finding.severity == "error"]
    told: list[Finding] = []
    for stage in case.stages:
        for name, status in stage.workers.items():
            test = _add_case(suite, f"{case.name}.{stage.stage}", name, stage.elapsed_s.get(name))
            worker = without_load_path(name)
            about = [finding for finding in wrong if worker in finding.workers and stage.stage in finding.stages]
            told += about
            if about:
                _add_result(test, "failure", about[0].message, about[0].kind, _finding_lines(about))
            elif status == "blocked":
                _add_result(test, "error", _BLOCKED, "blocked")
            elif status == "skipped":
                _add_result(test, "skipped", _NOT_COMPARED)
    _add_skipped(suite, case.name, (finding for finding in findings if finding.kind == kinds.SKIPPED))
    for lost in (worker for worker in case.workers if worker.status != "ok"):
        about = [finding for finding in wrong if finding.kind in _ERRORS and lost.name in finding.workers]
        lines = [*_finding_lines(about), *([lost.stack] if lost.stack and not about else [])]
        test = _add_case(suite, case.name, lost.name)
        _add_result(test, "error", lost.reason or lost.status, lost.status, lines)
        told += about
    for finding in (finding for finding in wrong if finding not in told):
        test = _add_case(suite, case.name, finding.kind)
        _add_result(test, "failure", finding.message, finding.kind, _finding_lines([finding]))
    if case.error is not None:
        _add_result(_add_case(suite, case.name, "input"), "error", case.headline, "input", [case.error])
    _count(suite)
    simulated = any(worker.simulated for worker in case.workers)
    profile = " ".join([case.profile, *case.settings]) if has_own_settings(case) else ""
    _add_properties(suite, {"simulated": "true" if simulated else "", "profile": profile, **properties})
    left = [f"not checked (level {case.level}): {', '.join(case.not_checked)}"] if case.not_checked else []
    devices = dict.fromkeys(f"{worker.name}: {worker.model} ({worker.architecture})" for worker in case.workers)
    _add_output(suite, [f for f in findings if f.severity != "error"], [*left, *devices])
    return suite


def _add_case(suite: ElementTree.Element, place: str, name: str, elapsed_s: float | None = None) -> ElementTree.Element:
    """Add a test case to a suite, with its time where that is known."""
    time = {} if elapsed_s is None else {"time": f"{elapsed_s:.3f}"}
    return ElementTree.SubElement(suite, "testcase", {"classname": _text(place), "name": _text(name), **time})


def _add_skipped(suite: ElementTree.Element, case: str, skipped: Iterable[Finding]) -> None:
    """Say why checks were skipped: in the test case of a stage that was as a whole, otherwise in one beside it."""
    whole = {(one.get("classname"), one.get("name")): one.find("skipped") for one in suite.iter("testcase")}
    found: dict[tuple[str, str], list[str]] = {}
    for finding in skipped:
        for stage in finding.stages:
            for worker in finding.workers:
                found.setdefault((stage, worker), []).append(finding.message)
    for (stage, worker), reasons in found.items():
        place, text = f"{case}.{stage}", "; ".join(reasons)
        mark = whole.get((_text(place), _text(worker)))
        if mark is not None:
            mark.set("message", _text(text))
        else:
            _add_result(_add_case(suite, place, f"{worker}: skipped checks"), "skipped", text)


def _add_output(suite: ElementTree.Element, findings: Iterable[Finding], more: Iterable[str]) -> None:
    """Add what a suite states beside its test cases."""
    lines = [f"{finding.severity}: {line}" for finding in findings for line in _finding_lines([finding])]
    if lines := [*lines, *more]:
        ElementTree.SubElement(suite, "system-out").text = _text("\n".join(lines))


def _add_result(
    case: ElementTree.Element, tag: str, message: str, kind: str | None = None, lines: Iterable[str] = ()
) -> None:
    """Give a test case its `failure`, `error` or `skipped`."""
    attributes = {"message": _text(message)} | ({} if kind is None else {"type": kind})
    found = ElementTree.SubElement(case, tag, attributes)
    found.text = _text("\n".join(lines))


def _count(element: ElementTree.Element) -> None:
    """Set the numbers of test cases, failures, errors and skipped ones within an element."""
    element.set("tests", str(len(list(element.iter("testcase")))))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(name, str(len(list(element.iter(tag)))))


def _add_properties(suite: ElementTree.Element, facts: Mapping[str, str]) -> None:
    """Add the facts that say something, before the test cases."""
    if any(facts.values()):
        properties = ElementTree.Element("properties")
        for name, value in facts.items():
            if value:
                ElementTree.SubElement(properties, "property", name=name, value=_text(value))
        suite.insert(0, properties)


def _finding_lines(findings: Iterable[Finding]) -> Iterable[str]:
    """Yield findings with their evidence and what to do next."""
    for finding in findings:
        yield finding.message
        yield from (f"  {line}" for line in finding.detail)
        if finding.next:
            yield f"  next: {finding.next}"


def _text(text: str) -> str:
    """Return text without characters that XML cannot hold."""
    return text.translate(_ILLEGAL)
