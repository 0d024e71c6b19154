"""`report.md`: a report to paste into an issue. A screen of it is visible, for any result; the rest is folded.

Every name may come from a stranger: outside of code fences Markdown's special characters are escaped, and a fence is
longer than any run of backticks in it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence

from consistency.capture.version import __version__
from consistency.capture.wording import and_more, counted, some
from consistency.case.load_path import is_alternative
from consistency.case.stages import Stage
from consistency.comparison.layers import LayerCell, layers_of
from consistency.comparison.result import PLANTED, Comparison, Finding, WorkerSummary
from consistency.report.findings import findings_of, is_command
from consistency.report.formats import View
from consistency.report.layers import cell_figures, devices_text
from consistency.report.merging import merging_texts
from consistency.report.sentences import (
    agreement_texts,
    alternative_path_texts,
    cell_text,
    command_text,
    divergence_texts,
    facts,
    not_checked_texts,
    origin_texts,
    sentence,
    source_texts,
)
from consistency.report.summary import Groups, all_groups, stages
from consistency.text import one_line

MOST_LINES = 40
"""Visible ones: readers of an issue skip more than a screen; the parts below add up to no more than this."""

_SOURCES = 3
_GROUP_LINES, _FINDINGS, _LAYERS, _DEVICES = 5, 3, 3, 8
_FOLDED = 20_000  # characters of a folded part
_ARCHITECTURES = 8  # columns of a table that a tracker still shows
_LONGEST = 400  # characters of a visible line: a sentence with a hundred workers is cut
_LONGEST_FOLDED = 4000

_SPECIAL = re.compile(
    r"([\\`*_{}\[\]<>|~$!^=])|(?<!\w)([@#])(?=\w)|(://)|(?<!\w)(www)(\.)|^([-+#]|\d+(?=[.)](?:\s|$)))"
)

_LIBRARIES = ("accelerate", "numpy", "peft", "safetensors", "transformers")


def render(comparison: Comparison, view: View) -> Iterator[bytes]:
    """Yield `report.md`."""
    yield as_markdown(comparison, view).encode()


def as_markdown(comparison: Comparison, view: View | None = None) -> str:
    """Return the report in GitHub's Markdown."""
    view = view or View()
    found = all_groups(comparison) if view.groups is None else view.groups
    findings = findings_of(comparison, view.folder)
    lines = [*_head(comparison), *_table(comparison, found), *numbered(_to_act_on(findings), _FINDINGS)]
    lines += [*_details(comparison, found, findings), *_environment(comparison)]
    return "".join(f"{line}\n" for line in lines)


def escaped(text: object) -> str:
    """Return text that Markdown shows literally: no markup, no HTML, no link, no mention."""

    def escape(match: re.Match[str]) -> str:
        special, call, scheme, www, dot, first = match.groups()
        if call:
            return f"{call}\u2060"  # word joiner: no backslash keeps a tracker from calling @somebody or linking #1
        if scheme:
            return "\\:\\/\\/"
        if www:
            return f"{www}\\{dot}"
        if first:
            return f"\\{first}" if first in "-+#" else f"{first}\u2060"
        return f"\\{special}"

    line = _cut(one_line(text)).replace("&", "&amp;")
    return _SPECIAL.sub(escape, line)


def fence(lines: Sequence[str]) -> list[str]:
    """Return lines as a block of code that none of them can end."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    ticks = "`" * max(3, longest + 1)
    return [f"{ticks}text", *lines, ticks]


def numbered(found: Sequence[Finding], most: int) -> Iterator[str]:
    """Yield the first findings as a numbered list, each with its evidence and what to do next; and how many follow."""
    if found:
        yield ""
    for number, finding in enumerate(found[:most], start=1):
        mark = "✗" if finding.severity == "error" else "warning:"
        lines = [f"{mark} **{escaped(finding.kind)}** {escaped(finding.message)}"]
        lines += [escaped(text.strip()) for text in finding.detail[:1]]
        lines += [f"Next: {_next(finding.next)}"] if finding.next else []
        indent = " " * len(f"{number}. ")
        yield f"{number}. " + f"\\\n{indent}".join(lines)
    if rest := and_more(len(found) - most, "finding"):
        yield f"{most + 1}. {rest}"


def _next(text: str) -> str:
    """Return what to do next: a command as code, whole."""
    if not is_command(text):
        return escaped(text)
    line = one_line(text)
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    blank = " " if "`" in line else ""
    return f"{ticks}{blank}{line}{blank}{ticks}"


def finding_lines(found: Sequence[Finding], shown: int) -> Iterator[str]:
    """Yield what the numbered list leaves out: further findings, and of each the evidence and the command; the notes.

    `shown` is how many the list has.
    """
    for number, finding in enumerate(_to_act_on(found), start=1):
        if number > shown:
            yield f"{number}. {finding.kind}: {finding.message}"
        yield from (f"{number}. {text}" for text in finding.detail[number <= shown :])
        if finding.next and number > shown:
            yield f"{number}. next: {finding.next}"
    for finding in found:
        if finding.severity == "note":
            yield f"note: {finding.message}"
            yield from (f"      {text}" for text in finding.detail)


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"


def _within(lines: Sequence[str]) -> list[str]:
    """Return the first lines, as many as a tracker takes, and how many follow."""
    room, kept = _FOLDED, 0
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        kept += 1
    rest = and_more(len(lines) - kept, "line")
    return [*lines[:kept], *([f"{rest}: report.json has them all"] if rest else [])]


def folded(title: str, lines: Sequence[str], *, above: Sequence[str] = ()) -> list[str]:
    """Return lines as a block of code that a reader opens, below Markdown; nothing where there is neither."""
    code = fence(_within([_cut(one_line(line), _LONGEST_FOLDED) for line in lines])) if lines else []
    content = [*above, *([""] if above else []), *code]
    return ["", f"<details><summary>{title}</summary>", "", *content, "</details>"] if content else []


def _head(comparison: Comparison) -> Iterator[str]:
    planted = [finding.message for finding in comparison.findings if finding.kind == PLANTED]
    drill = f" **A drill: {escaped('; '.join(planted)[:_LONGEST])}.**" if planted else ""
    yield f"**{comparison.verdict.upper()}** {escaped(sentence(comparison))}{drill}"
    yield ""
    if comparison.simulated:
        yield "**SIMULATED DEVICES: simulated in software; this report does not describe hardware.**"
        yield ""
    case = [comparison.case, *facts(comparison)]
    yield f"{' · '.join(escaped(part) for part in case)} · consistency {__version__}"
    origin = origin_texts(comparison)
    if origin:
        yield ""
        yield f"{' · '.join(map(escaped, origin))}"
        yield ""
        yield from fence([one_line(text) for text in _commands(comparison)])


def _commands(comparison: Comparison) -> list[str]:
    sources = source_texts(comparison)
    rest = and_more(len(sources) - _SOURCES, "capture")
    return [command_text(comparison.command), *sources[:_SOURCES], *([rest] if rest else [])]


def _table(comparison: Comparison, found: Groups) -> Iterator[str]:
    names = stages(comparison)
    mains = {load_path: some for load_path, some in found.items() if not is_alternative(load_path)}
    several = len(mains) > 1
    lines = [(load_path, group, line) for load_path, some in mains.items() for group in some for line in group.lines]
    merging = list(merging_texts(comparison.merging))
    most = _GROUP_LINES - 2 * bool(merging)  # the line below the table, and the empty one before it
    if len(lines) > most:  # mismatches first
        lines.sort(key=lambda one: -sum(cell.bad for cell in one[2].cells.values()))
    yield ""
    yield f"| architecture | workers | {' | '.join(escaped(name) for name in names)} |"
    yield "|---" * (2 + len(names)) + "|"
    for load_path, group, line in lines[:most]:
        workers = escaped(some(line.workers, 4))
        cells = [cell_text(name, line.cells.get(name)) for name in names]
        texts = [f"{cell.mark} {escaped(f'{cell.text} {cell.place}'.rstrip())}".rstrip() for cell in cells]
        title = escaped(group.architecture) + (f" ({escaped(load_path)})" if several else "")
        yield f"| {title} | {workers} | {' | '.join(texts)} |"
    if rest := and_more(len(lines) - most, "line"):
        yield f"| {rest} |"
    if merging:
        yield ""
        yield escaped(" · ".join(merging))


def _to_act_on(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "note"]


def _details(comparison: Comparison, found: Groups, findings: Sequence[Finding]) -> list[str]:
    """Return the worst layers, the rest of the findings, where workers diverge, and what was not checked."""
    lines = [*finding_lines(findings, _FINDINGS), *(text for _, text in alternative_path_texts(comparison))]
    lines += [*agreement_texts(comparison, found), *divergence_texts(comparison)]
    lines += not_checked_texts(comparison)
    return folded("Layers by architecture, details, notes, and what was not checked", lines, above=_layers(comparison))


def _layers(comparison: Comparison) -> list[str]:
    """Return a table of the layers nearest to their tolerance or beyond it, by architecture."""
    layers = [one for one in layers_of(comparison) if one.stage != Stage.OPERATORS and not one.is_equal]
    worst = heapq.nlargest(_LAYERS, layers, key=lambda one: one.badness)
    if not worst:
        return []
    bad = sum(tensor.is_wrong for tensor in comparison.tensors)
    names = [group.name for group in comparison.architectures]
    left = f" (of {len(names)} architectures {_ARCHITECTURES})" if len(names) > _ARCHITECTURES else ""
    title = f"mismatch in {counted(bad, 'tensor')}, the worst" if bad else "worst tensors"
    lines = [f"| {title}: difference / allowed, ratio{left} | {' | '.join(map(escaped, names[:_ARCHITECTURES]))} |"]
    lines.append("|---" * (1 + min(len(names), _ARCHITECTURES)) + "|")
    for one in worst:
        cells = [one.architectures.get(name) for name in names[:_ARCHITECTURES]]
        texts = ["" if cell is None else escaped(cell_figures(cell)) + _disagree(cell) for cell in cells]
        path = f" ({one.load_path})" if one.load_path != comparison.load_paths[0] else ""
        lines.append(f"| {escaped(one.name + path)} | {' | '.join(texts)} |")
    return lines


def _disagree(cell: LayerCell) -> str:
    return f" {escaped(devices_text(cell))}" if len(cell.classes) > 1 else ""


def _environment(comparison: Comparison) -> list[str]:
    """Return versions and devices as `torch.utils.collect_env` lays them out, which trackers ask for."""
    workers = comparison.workers
    named = (
        ("PyTorch version", "torch"),
        ("CUDA used to build PyTorch", "cuda"),
        ("OS", "platform"),
        ("Python version", "python"),
        ("cuDNN version", "cudnn"),
        ("CPU capability", "cpu_capability"),
    )
    lines = [f"{title}: {_values(workers, name)}" for title, name in named]
    drivers = dict.fromkeys(worker.driver for worker in workers if worker.driver)
    lines.append(f"Nvidia driver version: {'; '.join(map(str, drivers)) or 'N/A'}")
    devices = dict.fromkeys(
        f"{worker.name}: {worker.model} ({worker.architecture}){' simulated' if worker.simulated else ''}"
        for worker in workers
    )
    lines += list(devices)[:_DEVICES]
    lines += filter(None, [and_more(len(devices) - _DEVICES, "device")])
    lines += [f"[pip3] {name}=={_values(workers, name)}" for name in _LIBRARIES]
    return folded("Environment", lines)


def _values(workers: Sequence[WorkerSummary], name: str) -> str:
    """Return the value of a name in the environments; where they differ, each with its workers."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        value = worker.environment.get(name)
        found.setdefault("N/A" if value is None else str(value), []).append(worker.name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{value} ({some(names, 4)})" for value, names in found.items()) or "N/A"
