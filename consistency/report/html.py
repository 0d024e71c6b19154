"""`report.html` and `suite.html`: one file that opens from disk, without network, and shows where devices diverge.

All text is in the page and needs no JavaScript; only the table of layers of a run is drawn by the page's script, from
data in the page (`page/cells.py`); the page of a suite has none. Every name may come from a stranger's model, adapter
or capture: each value that the template shows is put on one line and escaped, the script sets text and never markup,
and a content security policy allows nothing but that script, and no request.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import itertools
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from consistency import plugins
from consistency.capture.version import __version__
from consistency.capture.wording import and_more, shortened, size, some
from consistency.case.load_path import is_alternative
from consistency.comparison.findings.transfers import matrices
from consistency.comparison.layers import LayerComparison
from consistency.comparison.result import BAD, Comparison
from consistency.comparison.suite import SuiteResult
from consistency.report.copy_matrix import cell_status, copies
from consistency.report.document import ResultTable
from consistency.report.documents import document_of
from consistency.report.formats import View
from consistency.report.layers import summary_lines
from consistency.report.markdown import finding_as_markdown
from consistency.report.marks import MARKS, VERDICT_MARKS, letter
from consistency.report.page import cells, tables
from consistency.report.page.cells import KEY
from consistency.report.page.rendering import PACKAGE, page_environment, part
from consistency.report.summary import Row, all_rows
from consistency.text import one_line

_MOST_FINDINGS = 100  # more than a person reads; `report.json` holds all
_MOST_TENSORS = 200  # names of tensors below a finding
_MOST_WORST = 64  # lines of the table of layers without a script
_MOST_DEVICES = 3  # named below their architecture
_MOST_MATRICES = 8  # hosts with a matrix of copies, those with wrong ones first
_MOST_SOURCES = 64  # captures named with their time and version
_MOST_CLASSES = 8  # boxes of a partition
_FOLD_ABOVE = 30  # cases of a suite

_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
"""Inside a JSON string these mean the same; in a script element `</script>` or `<!--` would end or change it."""


def render(result: Comparison | SuiteResult, view: View) -> Iterator[bytes]:
    """Yield the page."""
    yield as_html(result, view).encode()


def as_html(result: Comparison | SuiteResult, view: View | None = None) -> str:
    """Return the page of a run or of a suite."""
    view = view or View()
    if isinstance(result, Comparison) and view.rows is None:
        view = dataclasses.replace(view, rows=all_rows(result))  # once, for the document and for the page's columns
    document = document_of(result, view)
    script, run_values = "", {}
    if isinstance(result, Comparison):
        script, run_values = part("page.js"), _run_values(result, view)
    tables = [dataclasses.replace(table, rows=_faulty_first(table)) for table in document.tables]
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() if script else ""
    return _template().render(
        document=document,
        findings=document.to_act_on,
        line_feed=Markup("\n"),
        mark=VERDICT_MARKS[document.verdict],
        marks=VERDICT_MARKS,
        most_findings=_MOST_FINDINGS,
        most_tensors=_MOST_TENSORS,
        notes=document.notes,
        run=run_values,
        script=Markup(script),
        script_hash=script_hash,
        sources=_few(document.sources),
        style=Markup(part("style.css")),
        tables=tables,
        tool=__version__,
    )


@functools.cache
def _template(name: str = "template.html", package: str = PACKAGE) -> jinja2.Template:
    """Return a template, compiled once per process: that takes ten times as long as to render a small page."""
    return _environment().from_string(part(name, package))


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the environment of the page and its sections, with the filters that only these use."""
    environment = page_environment()
    environment.filters.update(letter=letter, link=urllib.parse.quote, shortened=shortened, size=size, some=some)
    environment.filters["reference_first"] = lambda names, reference: sorted(names, key=lambda name: name != reference)
    environment.filters["shown"] = lambda rows: [row for row in rows if not _is_folded(rows, row)]
    environment.filters["folded"] = lambda rows: [row for row in rows if _is_folded(rows, row)]
    return environment


def _sections(comparison: Comparison) -> Iterator[Markup]:
    """Yield the sections of plug-ins; one of another distribution that fails costs itself alone."""
    for reference, section in plugins.offered("sections"):
        rendered = None
        with plugins.at_own_cost(reference, f"the section {reference}"):
            values = section.values(comparison)
            if values:
                rendered = Markup(_template(section.template, section.package).render(values))
        if rendered is not None:
            yield rendered


def _run_values(comparison: Comparison, view: View) -> dict[str, Any]:
    """Return what the template shows of a run besides its document, by the names that the template has for it."""
    rows_by_path = all_rows(comparison) if view.rows is None else view.rows
    columns_by_path = {
        load_path: cells.columns(comparison, load_path, rows_by_path[load_path]) for load_path in comparison.load_paths
    }
    is_shortened = any(column.stands_for != 1 for columns in columns_by_path.values() for column in columns)
    layers = cells.unequal(comparison)
    worst = sorted(summary_lines(layers), key=lambda line: line[0] not in BAD)
    copy_matrices = sorted(matrices(comparison.tensors), key=lambda matrix: not matrix.wrong)
    partitions, partitions_left_out = tables.partitions(comparison.tensors)
    return {
        "agreement": partitions,
        "bits": tables.bits(comparison.tensors),
        "cell_status": cell_status,
        "copies": copies,
        "data": Markup(_data(comparison, layers, columns_by_path)),  # escaped for a script element, which is not HTML
        "environments": tables.environments(comparison.workers),
        "marks": MARKS,
        "markdown": lambda entry: _attribute(finding_as_markdown(comparison, entry.finding, entry.number)),
        "matrices": copy_matrices[:_MOST_MATRICES],
        "matrices_left_out": len(copy_matrices[_MOST_MATRICES:]),
        "most_classes": _MOST_CLASSES,
        "ratios": tables.ratios(comparison.tensors),
        "reference": comparison.reference,
        "sections": [*_sections(comparison)],
        "several_paths": sum(not is_alternative(path) for path in comparison.load_paths) > 1,
        "shortened": is_shortened,
        "ways_left_out": partitions_left_out,
        "workers": tables.workers(comparison),
        "worst_layers": [text for _, text in worst[:_MOST_WORST]],
    }


def _few(sources: Sequence[str]) -> list[str]:
    """Return the first captures and how many there are more."""
    texts = [*sources[:_MOST_SOURCES]]
    if left_out := and_more(len(sources) - _MOST_SOURCES, "capture"):
        texts.append(left_out)
    return texts


def _attribute(text: str) -> Markup:
    """Return a text of several lines for an attribute: line feeds stay, and each line is escaped."""
    return Markup("\n").join(one_line(line) for line in text.split("\n"))


def _faulty_first(table: ResultTable) -> tuple[Row, ...]:
    """Return the rows of a table with mismatches first: headings with one first, and rows with one below each."""
    if not table.heading:  # of a suite: its cases are in order already
        return table.rows
    blocks = [sorted(rows, key=lambda row: not row.bad) for rows in table.by_heading]
    blocks.sort(key=lambda rows: not any(row.bad for row in rows))
    return tuple(itertools.chain(*blocks))


def _is_folded(rows: Sequence[Row], row: Row) -> bool:
    """Return whether a row is folded: of many cases the consistent ones, so that failures are on the first screens."""
    return len(rows) > _FOLD_ABOVE and row.cells[0].kind == "consistent"


def _data(
    comparison: Comparison,
    layers: Sequence[LayerComparison],
    columns_by_path: Mapping[str, Sequence[cells.MapColumn]],
) -> str:
    """Return the data of the table of layers, as JSON that is safe in a script element."""
    strings = cells.Strings()
    sections = cells.sections(comparison, layers, columns_by_path, strings)
    architectures, columns = {}, {}
    for load_path, path_columns in columns_by_path.items():
        architectures[one_line(load_path)] = [
            [one_line(name), one_line(some(labels, _MOST_DEVICES))]
            for name, labels in cells.architectures(path_columns).items()
        ]
        columns[one_line(load_path)] = [
            [one_line(column.label), column.stands_for, one_line(column.architecture)] for column in path_columns
        ]
    table: dict[str, Any] = {
        "architectures": architectures,
        "columns": columns,
        "sections": sections,
        "strings": strings.all,  # after the sections, which add to them
        "key": KEY,
    }
    return msgspec.json.encode(table).decode().translate(_ESCAPES)
