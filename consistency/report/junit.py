"""A comparison as JUnit XML, for the dashboards that read it: one test case per stage and worker.

pytest's own `--junitxml` has one per tensor; this is for `consistency run`, where one run is one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

from consistency.comparison.result import Comparison, Finding
from consistency.comparison.rows import Workers
from consistency.report.formats import View
from consistency.report.sentences import command_text, profile_texts

ERRORS = frozenset({"lost-worker", "failed-worker"})
"""Kinds of findings that are errors of the workers' own test cases."""

BLOCKED = "the worker was lost before this stage"
NOT_COMPARED = "no tensor of this stage could be compared"

_ILLEGAL = {c: "�" for c in (*range(0x20), 0xFFFE, 0xFFFF) if c not in (0x9, 0xA, 0xD)}  # XML 1.0, 2.2 "Char"


def render(comparison: Comparison, view: View) -> Iterator[bytes]:
    """Yield the file."""
    suite = as_junit(comparison, elapsed_s=view.elapsed_s or 0.0)
    yield ElementTree.tostring(suite, "utf-8", xml_declaration=True)


def as_junit(comparison: Comparison, *, elapsed_s: float = 0.0) -> ElementTree.Element:
    """Return one suite: a finding about a stage on a worker fails its case, a lost worker is an error."""
    seen: dict[tuple[str, str, str], set[str]] = {}
    known: dict[tuple[object, ...], Workers] = {}
    for tensor in comparison.tensors:
        groups = [(None, tensor.workers), *((row.status, workers) for row, workers in tensor.groups)]  # in order first
        for status, workers in groups:
            taken = (id(workers), status, tensor.load_path, tensor.stage)
            for worker in workers if taken not in known else ():
                statuses = seen.setdefault((tensor.load_path, worker, tensor.stage), set())
                if status is not None:
                    statuses.add(status)
            known[taken] = workers  # which keeps its identity
    suite = ElementTree.Element("testsuite", name=text_of(f"consistency {comparison.case}"), time=f"{elapsed_s:.3f}")
    wrong = [finding for finding in comparison.findings if finding.severity == "error"]
    for (load_path, worker, stage), statuses in seen.items():
        name = worker if len(comparison.load_paths) < 2 else f"{worker} ({load_path})"
        about = [finding for finding in wrong if worker in finding.workers and _of(finding, stage)]
        case = add_case(suite, f"{comparison.case}.{stage}", name)
        if about:
            add_result(case, "failure", about[0].message, about[0].kind, _lines(about))
        elif statuses <= {"skipped"}:
            add_result(case, "skipped", NOT_COMPARED)
        elif "blocked" in statuses:
            add_result(case, "error", BLOCKED, "blocked")
    for lost in (worker for worker in comparison.workers if worker.status != "ok"):
        case = add_case(suite, comparison.case, lost.name)
        add_result(case, "error", lost.reason or lost.status, lost.status, [lost.stack or ""])
    for finding in (f for f in wrong if not f.tensors and f.kind not in ERRORS):
        case = add_case(suite, comparison.case, finding.kind)
        add_result(case, "failure", finding.message, finding.kind, _lines([finding]))
    if comparison.created is not None:
        suite.set("timestamp", text_of(comparison.created))
        suite.set("hostname", text_of(comparison.host))
    complete(
        suite, simulated=comparison.simulated, profile=" ".join(profile_texts(comparison)),
        planted=", ".join(comparison.planted), command=command_text(comparison.command), **comparison.versions,
    )  # fmt: skip
    return suite


def add_case(suite: ElementTree.Element, place: str, name: str) -> ElementTree.Element:
    """Add a test case to a suite."""
    return ElementTree.SubElement(suite, "testcase", classname=text_of(place), name=text_of(name))


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


def _of(finding: Finding, stage: str) -> bool:
    return any(name.startswith(f"{stage}::") for name in finding.tensors)


def _lines(findings: Iterable[Finding]) -> Iterable[str]:
    for finding in findings:
        yield finding.message
        yield from (f"  {line}" for line in finding.detail)


def text_of(text: str) -> str:
    """Return text without characters that XML cannot hold."""
    return text.translate(_ILLEGAL)
