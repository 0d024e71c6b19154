"""A suite as JUnit XML: a test suite per case, with a test case per stage and worker as in a single run's file."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from consistency.comparison.suite import CaseFinding, CaseResult, SuiteResult
from consistency.report.formats import View
from consistency.report.junit import BLOCKED, ERRORS, NOT_COMPARED, add_case, add_result, complete, count, text_of
from consistency.report.sentences import profile_texts


def render(suite: SuiteResult, _: View) -> Iterator[bytes]:
    """Yield the file."""
    yield ElementTree.tostring(suite_as_junit(suite), "utf-8", xml_declaration=True)


def suite_as_junit(suite: SuiteResult) -> ElementTree.Element:
    """Return one test suite per case; a case whose input cannot be used is an error."""
    name = text_of(f"consistency {suite.name}")
    root = ElementTree.Element("testsuites", name=name, time=f"{suite.elapsed_s:.3f}")
    root.extend(_suite(case) for case in suite.cases)
    count(root)
    return root


def _suite(case: CaseResult) -> ElementTree.Element:
    name = text_of(f"consistency {case.name}")
    suite = ElementTree.Element("testsuite", name=name, time=f"{case.elapsed_s:.3f}")
    wrong = [finding for finding in case.findings if finding.severity == "error"]
    for stage in case.stages:
        for worker, status in stage.workers.items():
            test = add_case(suite, f"{case.name}.{stage.stage}", worker)
            about = [finding for finding in wrong if worker in finding.workers and stage.stage in finding.stages]
            if about:
                add_result(test, "failure", about[0].message, about[0].kind, _lines(about))
            elif status == "blocked":
                add_result(test, "error", BLOCKED, "blocked")
            elif status == "skipped":
                add_result(test, "skipped", NOT_COMPARED)
    for lost in (worker for worker in case.workers if worker.status != "ok"):
        add_result(add_case(suite, case.name, lost.name), "error", lost.reason or lost.status, lost.status)
    for finding in (f for f in wrong if not f.stages and f.kind not in ERRORS):
        test = add_case(suite, case.name, finding.kind)
        add_result(test, "failure", finding.message, finding.kind, _lines([finding]))
    if case.error is not None:
        add_result(add_case(suite, case.name, "input"), "error", case.headline, "input", [case.error])
    simulated = any(worker.simulated for worker in case.workers)
    complete(suite, simulated=simulated, profile=" ".join(profile_texts(case)))
    return suite


def _lines(findings: list[CaseFinding]) -> Iterator[str]:
    for finding in findings:
        yield finding.message
        yield from (f"  {line}" for line in finding.detail)
