"""A comparison as JUnit XML, for the dashboards that read it: one test case per stage and worker.

pytest's own `--junitxml` has one per tensor; this is for `consistency run`, where one run is one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

from consistency.comparison.result import Comparison, Finding
from consistency.report.formats import View

_ILLEGAL = {c: "�" for c in (*range(0x20), 0xFFFE, 0xFFFF) if c not in (0x9, 0xA, 0xD)}  # XML 1.0, 2.2 "Char"


def render(comparison: Comparison, view: View) -> Iterator[bytes]:
    """Yield the file."""
    suite = as_junit(comparison, elapsed_s=view.elapsed_s or 0.0)
    yield ElementTree.tostring(suite, "utf-8", xml_declaration=True)


def as_junit(comparison: Comparison, *, elapsed_s: float = 0.0) -> ElementTree.Element:
    """Return one suite: a finding about a stage on a worker fails its case, a lost worker is an error."""
    seen: dict[tuple[str, str, str], set[str]] = {}
    for tensor in comparison.tensors:
        for row in tensor.rows:
            seen.setdefault((tensor.load_path, row.worker, tensor.stage), set()).add(row.status)
    suite = ElementTree.Element("testsuite", name=_text(f"consistency {comparison.case}"), time=f"{elapsed_s:.3f}")
    wrong = [finding for finding in comparison.findings if finding.severity == "error"]
    for (load_path, worker, stage), statuses in seen.items():
        name = worker if len(comparison.load_paths) < 2 else f"{worker} ({load_path})"
        about = [finding for finding in wrong if worker in finding.workers and _of(finding, stage)]
        case = _case(suite, f"{comparison.case}.{stage}", name)
        if about:
            _result(case, "failure", about[0].message, about[0].kind, _lines(about))
        elif statuses <= {"skipped"}:
            _result(case, "skipped", "no tensor of this stage could be compared")
        elif "blocked" in statuses:
            _result(case, "error", "the worker was lost before this stage", "blocked")
    for lost in (worker for worker in comparison.workers if worker.status != "ok"):
        case = _case(suite, comparison.case, lost.name)
        _result(case, "error", lost.reason or lost.status, lost.status, [lost.stack or ""])
    for finding in (f for f in wrong if not f.tensors and f.kind not in _ERRORS):
        case = _case(suite, comparison.case, finding.kind)
        _result(case, "failure", finding.message, finding.kind, _lines([finding]))
    suite.set("tests", str(len(suite)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"*/{tag}"))))
    if comparison.simulated:
        properties = ElementTree.Element("properties")
        ElementTree.SubElement(properties, "property", name="simulated", value="true")
        suite.insert(0, properties)
    return suite


_ERRORS = frozenset({"lost-worker", "failed-worker"})  # kinds of findings that are errors of the workers' own cases


def _case(suite: ElementTree.Element, place: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_text(place), name=_text(name))


def _result(
    case: ElementTree.Element, tag: str, message: str, kind: str | None = None, lines: Iterable[str] = ()
) -> None:
    attributes = {"message": _text(message)} | ({} if kind is None else {"type": kind})
    found = ElementTree.SubElement(case, tag, attributes)
    found.text = _text("\n".join(lines))


def _of(finding: Finding, stage: str) -> bool:
    return any(name.startswith(f"{stage}::") for name in finding.tensors)


def _lines(findings: Iterable[Finding]) -> Iterable[str]:
    for finding in findings:
        yield finding.message
        yield from (f"  {line}" for line in finding.detail)


def _text(text: str) -> str:
    return text.translate(_ILLEGAL)
