"""A suite as JUnit XML: a test suite per case, with a test case per stage and worker as in a single run's file."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from consistency.comparison.result import SKIPPED
from consistency.comparison.suite import CaseFinding, CaseResult, SuiteResult
from consistency.report.formats import View
from consistency.report.junit import (
    BLOCKED,
    ERRORS,
    NOT_COMPARED,
    add_case,
    add_output,
    add_result,
    add_skipped,
    complete,
    count,
    finding_lines,
    text_of,
)
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
    told: list[CaseFinding] = []
    for stage in case.stages:
        for worker, status in stage.workers.items():
            test = add_case(suite, f"{case.name}.{stage.stage}", worker, stage.elapsed_s.get(worker))
            about = [finding for finding in wrong if worker in finding.workers and stage.stage in finding.stages]
            told += about
            if about:
                add_result(test, "failure", about[0].message, about[0].kind, finding_lines(about))
            elif status == "blocked":
                add_result(test, "error", BLOCKED, "blocked")
            elif status == "skipped":
                add_result(test, "skipped", NOT_COMPARED)
    add_skipped(suite, case.name, ((f, f.stages) for f in case.findings if f.kind == SKIPPED))
    for lost in (worker for worker in case.workers if worker.status != "ok"):
        about = [finding for finding in wrong if finding.kind in ERRORS and lost.name in finding.workers]
        test = add_case(suite, case.name, lost.name)
        add_result(test, "error", lost.reason or lost.status, lost.status, finding_lines(about))
        told += about
    for finding in (finding for finding in wrong if finding not in told):
        test = add_case(suite, case.name, finding.kind)
        add_result(test, "failure", finding.message, finding.kind, finding_lines([finding]))
    if case.error is not None:
        add_result(add_case(suite, case.name, "input"), "error", case.headline, "input", [case.error])
    simulated = any(worker.simulated for worker in case.workers)
    complete(suite, simulated=simulated, profile=" ".join(profile_texts(case)))
    left = [f"not checked (level {case.level}): {', '.join(case.not_checked)}"] if case.not_checked else []
    add_output(suite, [f for f in case.findings if f.severity != "error"], left)
    return suite
