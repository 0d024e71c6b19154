"""`report.html`: one file that opens from disk, without network, and shows where devices diverge.

All text is in the page and needs no JavaScript; only the table of layers is drawn by the page's script, from data in
the page (`page/cells.py`). Every name may come from a stranger's model, adapter or capture: each value that the
template shows is put on one line and escaped, the script sets text and never markup, and a content security policy
allows nothing but that script, and no request.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from consistency.capture.version import __version__
from consistency.capture.wording import and_more, shortened, size, some
from consistency.case.load_path import is_alternative
from consistency.comparison.findings.transfers import matrices
from consistency.comparison.layers import LayerComparison
from consistency.comparison.result import BAD, Comparison
from consistency.report.copy_matrix import cell_mark, copies
from consistency.report.findings import findings_of
from consistency.report.formats import View
from consistency.report.layers import summary_lines
from consistency.report.merging import merging_texts
from consistency.report.one_finding import as_markdown
from consistency.report.page import agreement, cells, distributions, environments, memory
from consistency.report.page.labels import KEY, letter
from consistency.report.page.rendering import VERDICT_MARKS, page_environment, part
from consistency.report.sentences import (
    agreement_texts,
    alternative_path_texts,
    cell_text,
    command_text,
    divergence_texts,
    facts,
    legend,
    origin_texts,
    sentence,
    source_texts,
)
from consistency.report.summary import Group, Line, all_groups, stages
from consistency.text import one_line

_MOST_FINDINGS = 100  # more than a person reads; `report.json` holds all
_MOST_TENSORS = 200  # names of tensors below a finding
_MOST_WORST = 64  # lines of the table of layers without a script
_MOST_DEVICES = 3  # named below their architecture
_MOST_MATRICES = 8  # hosts with a matrix of copies, those with wrong ones first
_MOST_SOURCES = 64  # captures named with their time and version
_MOST_CLASSES = 8  # boxes of a partition

_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})
"""Inside a JSON string these mean the same; in a script element `</script>` or `<!--` would end or change it."""


def render(comparison: Comparison, view: View) -> Iterator[bytes]:
    """Yield `report.html`."""
    yield as_html(comparison, view).encode()


def as_html(comparison: Comparison, view: View | None = None) -> str:
    """Return the page."""
    view = view or View()
    found = all_groups(comparison) if view.groups is None else view.groups
    findings = findings_of(comparison, view.folder)
    script = part("page.js")
    parted, ways_left_out = agreement.partitions(comparison.tensors)
    by_load_path = {
        load_path: cells.columns(comparison, load_path, found[load_path]) for load_path in comparison.load_paths
    }
    layers = cells.unequal(comparison)
    worst = sorted(summary_lines(layers), key=lambda line: line[0] not in BAD)
    copied = sorted(matrices(comparison.tensors), key=lambda matrix: not matrix.wrong)
    environment = page_environment()
    environment.filters["as_markdown"] = lambda finding, number: _attribute(as_markdown(comparison, finding, number))
    environment.filters.update(letter=letter, shortened=shortened, size=size, some=some)
    environment.filters["reference_first"] = lambda names: sorted(names, key=lambda name: name != comparison.reference)
    return environment.from_string(
        part("template.html")
    ).render(
        agreement=parted,
        bits=distributions.bits(comparison.tensors),
        captures=len(comparison.sources),
        case=comparison.case,
        cell_mark=cell_mark,
        cell_text=cell_text,
        command=command_text(comparison.command),
        copies=copies,
        data=Markup(_data(comparison, layers, by_load_path)),  # escaped for a script element, which is not HTML
        environments=environments.environments(comparison.workers),
        facts=facts(comparison),
        findings=[finding for finding in findings if finding.severity != "note"],
        divergences=[*agreement_texts(comparison, found), *divergence_texts(comparison)],
        groups={path: _faulty_first(found[path]) for path in comparison.load_paths if not is_alternative(path)},
        alternative_paths=[text for _, text in alternative_path_texts(comparison)],
        key=KEY,
        mark=VERDICT_MARKS[comparison.verdict],
        legend=legend(line.cells for some in found.values() for group in some for line in group.lines),
        line_feed=Markup("\n"),
        merging=list(merging_texts(comparison.merging)),
        matrices=copied[:_MOST_MATRICES],
        matrices_left_out=len(copied[_MOST_MATRICES:]),
        most_classes=_MOST_CLASSES,
        most_findings=_MOST_FINDINGS,
        most_tensors=_MOST_TENSORS,
        not_checked=comparison.not_checked,
        notes=[finding for finding in findings if finding.severity == "note"],
        origin=origin_texts(comparison),
        planted=comparison.planted,
        ratios=distributions.ratios(comparison.tensors),
        reference=comparison.reference,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sentence=sentence(comparison),
        shortened=any(column.stands_for != 1 for some in by_load_path.values() for column in some),
        simulated=comparison.simulated,
        sources=_few(source_texts(comparison)),
        stages=stages(comparison),
        status_of={"=": "equal", "✗": "outside", "–": "skipped"},
        style=Markup(part("style.css")),
        tool=__version__,
        verdict=comparison.verdict,
        ways_left_out=ways_left_out,
        workers=memory.workers(comparison),
        worst_layers=[text for _, text in worst[:_MOST_WORST]],
    )


def _few(sources: Sequence[str]) -> list[str]:
    """Return the first captures and how many there are more."""
    rest = and_more(len(sources) - _MOST_SOURCES, "capture")
    return [*sources[:_MOST_SOURCES], *([rest] if rest else [])]


def _attribute(text: str) -> Markup:
    """Return a text of several lines for an attribute: line feeds stay, and each line is escaped."""
    return Markup("\n").join(one_line(line) for line in text.split("\n"))


def _faulty_first(groups: Sequence[Group]) -> list[Group]:
    """Return architectures, and the lines of each, with mismatches before others."""

    def is_fine(line: Line) -> bool:
        return not any(cell.bad for cell in line.cells.values())

    ordered = [dataclasses.replace(group, lines=tuple(sorted(group.lines, key=is_fine))) for group in groups]
    return sorted(ordered, key=lambda group: all(map(is_fine, group.lines)))


def _data(
    comparison: Comparison,
    layers: Sequence[LayerComparison],
    by_load_path: Mapping[str, Sequence[cells.Column]],
) -> str:
    """Return the data of the table of layers, as JSON that is safe in a script element."""
    strings = cells.Strings()
    sections = cells.sections(comparison, layers, by_load_path, strings)
    table: dict[str, Any] = {
        "architectures": {
            one_line(load_path): [
                [one_line(name), one_line(some(labels, _MOST_DEVICES))]
                for name, labels in cells.architectures(drawn).items()
            ]
            for load_path, drawn in by_load_path.items()
        },
        "columns": {
            one_line(load_path): [
                [one_line(column.label), column.stands_for, one_line(column.architecture)] for column in drawn
            ]
            for load_path, drawn in by_load_path.items()
        },
        "sections": sections,
        "strings": strings.all,
        "key": KEY,
    }
    return msgspec.json.encode(table).decode().translate(_ESCAPES)
