"""A comparison as JUnit XML, for the dashboards that read it: one test case per stage and worker.

pytest's own `--junitxml` has one per tensor; this is for `consistency run`, where a night is one file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from consistency.capture.folder import write_whole
from consistency.comparison.result import Comparison, Finding

_ILLEGAL = {c: "�" for c in (*range(0x20), 0xFFFE, 0xFFFF) if c not in (0x9, 0xA, 0xD)}  # XML 1.0, 2.2 "Char"


def write_junit(comparison: Comparison, path: Path, *, elapsed_s: float = 0.0) -> None:
    """Write the file, whole or not at all."""
    write_whole(path, [ElementTree.tostring(as_junit(comparison, elapsed_s=elapsed_s), "utf-8", xml_declaration=True)])


def as_junit(comparison: Comparison, *, elapsed_s: float = 0.0) -> ElementTree.Element:
    """Return one suite: a finding about a stage on a worker fails its case, a lost worker is an error."""
    seen: dict[tuple[str, str, str], set[str]] = {}
    for tensor in comparison.tensors:
        for row in tensor.rows:
            seen.setdefault((tensor.load_path, row.worker, tensor.stage), set()).add(row.status)
    suite = ElementTree.Element("testsuite", name=_text(f"consistency {comparison.case}"), time=f"{elapsed_s:.3f}")
    failures = errors = skipped = 0
    wrong = [finding for finding in comparison.findings if finding.severity == "error"]
    for (load_path, worker, stage), statuses in seen.items():
        name = worker if len(comparison.load_paths) < 2 else f"{worker} ({load_path})"
        place = _text(f"{comparison.case}.{stage}")
        case = ElementTree.SubElement(suite, "testcase", classname=place, name=_text(name))
        about = [finding for finding in wrong if worker in finding.workers and _of(finding, stage)]
        if about:
            failures += 1
            failure = ElementTree.SubElement(case, "failure", message=_text(about[0].message), type=about[0].kind)
            failure.text = _text("\n".join(_lines(about)))
        elif statuses <= {"skipped"}:
            skipped += 1
            ElementTree.SubElement(case, "skipped", message="no tensor of this stage could be judged")
        elif "blocked" in statuses:
            errors += 1
            ElementTree.SubElement(case, "error", message="the worker was lost before it", type="blocked")
    for lost in (worker for worker in comparison.workers if worker.status != "ok"):
        errors += 1
        case = ElementTree.SubElement(suite, "testcase", classname=_text(comparison.case), name=_text(lost.name))
        error = ElementTree.SubElement(case, "error", message=_text(lost.reason or lost.status), type=lost.status)
        error.text = _text(lost.stack or "")
    for finding in (f for f in wrong if not f.tensors and f.kind not in _TOLD):
        failures += 1
        case = ElementTree.SubElement(suite, "testcase", classname=_text(comparison.case), name=_text(finding.kind))
        failure = ElementTree.SubElement(case, "failure", message=_text(finding.message), type=finding.kind)
        failure.text = _text("\n".join(_lines([finding])))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failures))
    suite.set("errors", str(errors))
    suite.set("skipped", str(skipped))
    if comparison.simulated:
        properties = ElementTree.Element("properties")
        ElementTree.SubElement(properties, "property", name="simulated", value="true")
        suite.insert(0, properties)
    return suite


_TOLD = frozenset({"lost-worker", "failed-worker"})


def _of(finding: Finding, stage: str) -> bool:
    return any(name.startswith(f"{stage}::") for name in finding.tensors)


def _lines(findings: Iterable[Finding]) -> Iterable[str]:
    for finding in findings:
        yield finding.message
        yield from (f"  {line}" for line in finding.detail)


def _text(text: str) -> str:
    return text.translate(_ILLEGAL)
