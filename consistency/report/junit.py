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

_ILLEGAL = {code: "�" for code in (*range(0x20), 0xFFFE, 0xFFFF) if code not in (0x9, 0xA, 0xD)}
"""A replacement for each character that XML cannot hold: XML 1.0, 2.2 "Char"."""


def render(result: Comparison | SuiteResult, view: View) -> Iterator[bytes]:
    """Yield the XML file of a run or a suite."""
    if isinstance(result, SuiteResult):
        root = suite_as_junit(result)
    else:
        root = as_junit(result, elapsed_s=view.elapsed_s or 0.0, folder=view.folder)
    yield ElementTree.tostring(root, "utf-8", xml_declaration=True)


def as_junit(comparison: Comparison, *, elapsed_s: float = 0.0, folder: str | None = None) -> ElementTree.Element:
    """Return one test suite: a finding about a stage on a worker fails its case, a lost worker is an error.

    Names are the same whatever the level: a load path is named where it is not the usual one. What no test case can
    state is in the suite's output: warnings, notes, what was not checked, and the devices.
    """
    case = summarize(comparison.case, "", comparison, elapsed_s)
    simulated = "true" if comparison.simulated else ""
    suite = _suite(
        case,
        findings_of(comparison, folder),
        simulated=simulated,
        planted=", ".join(comparison.planted),
        command=command_text(comparison.command),
        **comparison.versions,
    )
    if comparison.created is not None:
        suite.set("timestamp", _legal(comparison.created))
        suite.set("hostname", _legal(comparison.host))
    return suite


def suite_as_junit(suite: SuiteResult) -> ElementTree.Element:
    """Return one test suite per case; a case whose input cannot be used is an error."""
    name = _legal(f"consistency {suite.name}")
    root = ElementTree.Element("testsuites", name=name, time=f"{suite.elapsed_s:.3f}")
    root.extend(_suite(case, case.findings) for case in suite.cases)
    _count(root)
    return root


def _suite(case: CaseResult, findings: Sequence[Finding], **properties: str) -> ElementTree.Element:
    """Return the test suite of a case; `properties` add to, or replace, those that every suite has."""
    suite = ElementTree.Element("testsuite", name=_legal(f"consistency {case.name}"), time=f"{case.elapsed_s:.3f}")
    errors = [finding for finding in findings if finding.severity == "error"]
    reported = _add_stages(suite, case, errors)
    _add_skipped(suite, case.name, (finding for finding in findings if finding.kind == kinds.SKIPPED))
    reported += _add_lost_workers(suite, case, errors)
    # An error that is about no stage on a worker, and about no lost worker, has a test case of its own.
    for finding in errors:
        if finding not in reported:
            test = _add_case(suite, case.name, finding.kind)
            _add_result(test, "failure", finding.message, finding.kind, _finding_lines([finding]))
    if case.error is not None:
        _add_result(_add_case(suite, case.name, "input"), "error", case.headline, "input", [case.error])
    _count(suite)
    _add_properties(suite, {**_properties(case), **properties})
    remarks = [f"not checked (level {case.level}): {', '.join(case.not_checked)}"] if case.not_checked else []
    devices = dict.fromkeys(f"{worker.name}: {worker.model} ({worker.architecture})" for worker in case.workers)
    _add_output(suite, [finding for finding in findings if finding.severity != "error"], [*remarks, *devices])
    return suite


def _add_stages(suite: ElementTree.Element, case: CaseResult, errors: Sequence[Finding]) -> list[Finding]:
    """Add a test case per stage and worker; return the errors that these report."""
    reported: list[Finding] = []
    for stage in case.stages:
        for name, status in stage.workers.items():
            test = _add_case(suite, f"{case.name}.{stage.stage}", name, stage.elapsed_s.get(name))
            worker = without_load_path(name)
            causes = [error for error in errors if worker in error.workers and stage.stage in error.stages]
            reported += causes
            if causes:
                _add_result(test, "failure", causes[0].message, causes[0].kind, _finding_lines(causes))
            elif status == "blocked":
                _add_result(test, "error", _BLOCKED, "blocked")
            elif status == "skipped":
                _add_result(test, "skipped", _NOT_COMPARED)
    return reported


def _add_lost_workers(suite: ElementTree.Element, case: CaseResult, errors: Sequence[Finding]) -> list[Finding]:
    """Add a test case, with an error, per worker that was lost or failed; return the errors that these report."""
    reported: list[Finding] = []
    for worker in case.workers:
        if worker.status == "ok":
            continue
        causes = [error for error in errors if error.kind in _ERRORS and worker.name in error.workers]
        lines = [*_finding_lines(causes)]
        if worker.stack and not causes:  # the findings have the stack already
            lines.append(worker.stack)
        test = _add_case(suite, case.name, worker.name)
        _add_result(test, "error", worker.reason or worker.status, worker.status, lines)
        reported += causes
    return reported


def _properties(case: CaseResult) -> dict[str, str]:
    """Return whether any device is simulated, and the profile; empty texts are not written."""
    simulated = "true" if any(worker.simulated for worker in case.workers) else ""
    profile = " ".join([case.profile, *case.settings]) if has_own_settings(case) else ""
    return {"simulated": simulated, "profile": profile}


def _add_case(
    suite: ElementTree.Element, class_name: str, name: str, elapsed_s: float | None = None
) -> ElementTree.Element:
    """Add a test case to a suite, with its time where that is known."""
    attributes = {"classname": _legal(class_name), "name": _legal(name)}
    if elapsed_s is not None:
        attributes["time"] = f"{elapsed_s:.3f}"
    return ElementTree.SubElement(suite, "testcase", attributes)


def _add_skipped(suite: ElementTree.Element, case: str, skipped: Iterable[Finding]) -> None:
    """Say why checks were skipped: in the test case of a stage that was as a whole, otherwise in one beside it."""
    skipped_elements = {
        (test.get("classname"), test.get("name")): test.find("skipped") for test in suite.iter("testcase")
    }
    reasons: dict[tuple[str, str], list[str]] = {}
    for finding in skipped:
        for stage in finding.stages:
            for worker in finding.workers:
                reasons.setdefault((stage, worker), []).append(finding.message)
    for (stage, worker), messages in reasons.items():
        class_name, message = f"{case}.{stage}", "; ".join(messages)
        element = skipped_elements.get((_legal(class_name), _legal(worker)))
        if element is not None:
            element.set("message", _legal(message))
        else:
            _add_result(_add_case(suite, class_name, f"{worker}: skipped checks"), "skipped", message)


def _add_output(suite: ElementTree.Element, findings: Iterable[Finding], remarks: Iterable[str]) -> None:
    """Add the output of a suite: findings that fail no test case, then remarks; nothing where there are neither."""
    lines = [f"{finding.severity}: {line}" for finding in findings for line in _finding_lines([finding])]
    lines += remarks
    if lines:
        ElementTree.SubElement(suite, "system-out").text = _legal("\n".join(lines))


def _add_result(
    case: ElementTree.Element, tag: str, message: str, kind: str | None = None, lines: Iterable[str] = ()
) -> None:
    """Give a test case its `failure`, `error` or `skipped`."""
    attributes = {"message": _legal(message)}
    if kind is not None:
        attributes["type"] = kind
    ElementTree.SubElement(case, tag, attributes).text = _legal("\n".join(lines))


def _count(element: ElementTree.Element) -> None:
    """Set the numbers of test cases, failures, errors and skipped ones within an element."""
    element.set("tests", str(len(list(element.iter("testcase")))))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(name, str(len(list(element.iter(tag)))))


def _add_properties(suite: ElementTree.Element, facts: Mapping[str, str]) -> None:
    """Add the facts that are not empty, before the test cases."""
    if any(facts.values()):
        properties = ElementTree.Element("properties")
        for name, value in facts.items():
            if value:
                ElementTree.SubElement(properties, "property", name=name, value=_legal(value))
        suite.insert(0, properties)


def _finding_lines(findings: Iterable[Finding]) -> Iterable[str]:
    """Yield each finding's message, its evidence and what to do next."""
    for finding in findings:
        yield finding.message
        yield from (f"  {line}" for line in finding.detail)
        if finding.next:
            yield f"  next: {finding.next}"


def _legal(text: str) -> str:
    """Return text without characters that XML cannot hold."""
    return text.translate(_ILLEGAL)
