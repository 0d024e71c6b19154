"""One finding as Markdown, to paste into an issue or a chat."""

from __future__ import annotations

from consistency.capture.version import __version__
from consistency.capture.wording import some
from consistency.comparison.result import Comparison, Finding
from consistency.report.markdown import escaped, fence
from consistency.report.sentences import facts
from consistency.text import one_line

MOST_LINES = 20
"""Lines of evidence: a stack has about as many, and `report.json` holds all."""

_MOST_TENSORS = 3


def as_markdown(comparison: Comparison, finding: Finding, number: int) -> str:
    """Return a finding with its evidence, the devices it names, and what was compared."""
    mark = {"error": "✗", "warning": "warning:"}.get(finding.severity, "note:")
    lines = [f"{mark} **{escaped(finding.kind)}** {escaped(finding.message)}", ""]
    if comparison.simulated or comparison.planted:  # as the report's own first lines
        lines += ["**Not a fault of a device: simulated devices or a planted fault.**", ""]
    evidence = [one_line(line) for line in finding.detail[:MOST_LINES]]
    if len(finding.detail) > MOST_LINES:
        evidence.append(f"and {len(finding.detail) - MOST_LINES} more lines")
    evidence += [f"next: {one_line(finding.next)}"] if finding.next else []
    if evidence:
        lines += [*fence(evidence), ""]
    if finding.tensors:
        lines.append(f"* tensors: {escaped(some(finding.tensors, _MOST_TENSORS))}")
    named = set(finding.workers)
    devices = [f"{one.name} ({one.architecture}, {one.model})" for one in comparison.workers if one.name in named]
    if devices:
        lines.append(f"* devices: {escaped(some(devices))}")
    case = " · ".join(escaped(text) for text in (comparison.case, *facts(comparison)))
    lines.append(f"* finding {number} of {case} · consistency {__version__}")
    return "".join(f"{line}\n" for line in lines)
