"""A comparison of captures, or the result of a suite, as a document: a row per kind of worker, or per case."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import msgspec

from consistency.capture.wording import and_more, counted, some
from consistency.case import standard
from consistency.case.load_path import is_alternative
from consistency.case.stages import SPECS, stage_order
from consistency.comparison.layers import LayerCell, layers_of
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import Comparison, Finding, WorkerSummary
from consistency.comparison.suite import CaseResult, SuiteFinding, SuiteResult, common_findings, worst_first
from consistency.devices.host.facts import HostFacts
from consistency.report import summary
from consistency.report.document import Column, Document, Entry, ResultTable, Sheet, numbered
from consistency.report.findings import findings_of, reproduce_command
from consistency.report.formats import View
from consistency.report.layers import cell_figures, devices_text
from consistency.report.merging import MERGING, MERGING_LEGEND, merging_cell, merging_texts
from consistency.report.sentences import (
    agreement_texts,
    alternative_path_texts,
    command_text,
    divergence_texts,
    facts,
    origin_texts,
    profile_texts,
    sentence,
    source_texts,
    time_text,
    versions_text,
)
from consistency.report.summary import (
    Cell,
    CellText,
    Row,
    Rows,
    cell_text,
    legend,
    merged,
    plain_cell,
    verdict_cell,
)

_LAYERS, _ARCHITECTURES = 3, 8  # rows and columns that a tracker still shows
_DEVICES = 8

_LIBRARIES = ("accelerate", "numpy", "peft", "safetensors", "transformers")
_VERSIONS = (
    ("PyTorch version", "torch"),
    ("CUDA used to build PyTorch", "cuda"),
    ("ROCM used to build PyTorch", "hip"),
    ("OS", "platform"),
    ("Python version", "python"),
    ("cuDNN version", "cudnn"),
    ("CPU capability", "cpu_capability"),
)


def comparison_document(comparison: Comparison, view: View) -> Document:
    """Return the report of a run, or of captures that were compared."""
    rows_by_path = summary.all_rows(comparison) if view.rows is None else view.rows
    remarks = [*agreement_texts(comparison, rows_by_path), *divergence_texts(comparison)]
    workers_with_inputs = [worker for worker in comparison.workers if worker.environment.get("inputs")]
    if workers_with_inputs:
        remarks.append(f"inputs: {_values(workers_with_inputs, 'inputs')}")
    return Document(
        name=comparison.case,
        facts=tuple(facts(comparison, view.elapsed_s)),
        origin=" · ".join(origin_texts(comparison)),
        command=command_text(comparison.command),
        sources=tuple(source_texts(comparison)),
        verdict=comparison.verdict,
        sentence=sentence(comparison),
        simulated=comparison.simulated,
        planted=comparison.planted,
        entries=numbered(findings_of(comparison, view.folder)),
        tables=tables(comparison, rows_by_path),
        legend=tuple(legend(row for rows in rows_by_path.values() for row in rows)),
        remarks=(*alternative_path_texts(comparison), *(("", text) for text in remarks)),
        merging=tuple(merging_texts(comparison.merging)),
        not_checked=comparison.not_checked,
        not_checked_title=f"not checked (level {comparison.level})",
        layers=_worst_layers(comparison),
        environment=(*environment_texts(comparison.workers), *busy_host_texts(comparison.hosts)),
    )


def tables(comparison: Comparison, rows_by_path: Rows) -> tuple[ResultTable, ...]:
    """Return a table per default load path: the workers of each architecture, and a cell per stage."""
    columns = tuple(_stage_columns(summary.stages(comparison)))
    defaults = {path: rows for path, rows in rows_by_path.items() if not is_alternative(path)}
    return tuple(
        ResultTable(
            label="workers",
            heading="architecture",
            title=f"load path: {path}" if len(defaults) > 1 else "",
            columns=columns,
            rows=tuple(rows),
            reference=comparison.reference,
        )
        for path, rows in defaults.items()
    )


def _stage_columns(stages: Sequence[str]) -> Iterator[Column]:
    short_titles: dict[str, str] = {spec.stage: spec.short for spec in SPECS.values()}
    for stage in stages:
        yield Column(title=stage, short=short_titles.get(stage, ""))


def _worst_layers(comparison: Comparison) -> Sheet | None:
    """Return the layers nearest to their tolerance or beyond it, by architecture; None where all are equal."""
    # An operator is no layer of the model.
    layers = [layer for layer in layers_of(comparison) if layer.stage != standard.OPERATORS and not layer.is_equal]
    worst = heapq.nlargest(_LAYERS, layers, key=lambda layer: layer.badness)
    if not worst:
        return None
    mismatches = sum(tensor.is_wrong for tensor in comparison.tensors)
    title = f"mismatch in {counted(mismatches, 'tensor')}, the worst" if mismatches else "worst tensors"
    architectures = [group.name for group in comparison.architectures]
    shown = architectures[:_ARCHITECTURES]
    left_out = ""
    if len(architectures) > len(shown):
        left_out = f" (of {len(architectures)} architectures {len(shown)})"
    rows = []
    for layer in worst:
        path = f" ({layer.load_path})" if layer.load_path != comparison.load_paths[0] else ""
        rows.append((layer.name + path, *(_figures(layer.architectures.get(name)) for name in shown)))
    titles = (f"{title}: difference / allowed, ratio{left_out}", *shown)
    return Sheet(titles=titles, rows=tuple(rows))


def _figures(cell: LayerCell | None) -> str:
    """Return an architecture's figures of a layer, and its devices where they differ bitwise."""
    if cell is None:
        return ""
    return f"{cell_figures(cell)} {devices_text(cell)}" if len(cell.classes) > 1 else cell_figures(cell)


def environment_texts(workers: Sequence[WorkerSummary]) -> Iterator[str]:
    """Yield versions and devices as `torch.utils.collect_env` lays them out, which trackers ask for."""
    yield from (f"{title}: {_values(workers, name)}" for title, name in _VERSIONS)
    drivers = dict.fromkeys(worker.driver for worker in workers if worker.driver)
    yield f"Nvidia driver version: {'; '.join(map(str, drivers)) or 'N/A'}"
    devices = dict.fromkeys(map(_device_text, workers))
    yield from list(devices)[:_DEVICES]
    if left_out := and_more(len(devices) - _DEVICES, "device"):
        yield left_out
    yield from (f"[pip3] {name}=={_values(workers, name)}" for name in _LIBRARIES)


def busy_host_texts(hosts: Sequence[HostFacts]) -> Iterator[str]:
    """Yield a line about the hosts on which something else computed."""
    names = dict.fromkeys(host_facts.host for host_facts in hosts if host_facts.is_busy)
    if names:
        yield (
            f"{some(list(names))}: something else computed on more than half of the cores when the run began; by "
            "default, threads of workers that wait sleep sooner there (GOMP_SPINCOUNT)"
        )


def _device_text(worker: WorkerSummary) -> str:
    simulated = " simulated" if worker.simulated else ""
    return f"{worker.name}: {worker.model} ({worker.architecture}){simulated}"


def _values(workers: Sequence[WorkerSummary], name: str) -> str:
    """Return the value of a name in the environments; where they differ, each with its workers."""
    workers_by_value: dict[str, list[str]] = {}
    for worker in workers:
        value = worker.environment.get(name)
        workers_by_value.setdefault("N/A" if value is None else str(value), []).append(worker.name)
    if len(workers_by_value) == 1:
        return next(iter(workers_by_value))
    return "; ".join(f"{value} ({some(names, 4)})" for value, names in workers_by_value.items()) or "N/A"


def suite_document(suite: SuiteResult, view: View) -> Document:
    """Return the report of a suite; the commands in it name the folder of the view."""
    stages = sorted({stage.stage for case in suite.cases for stage in case.stages}, key=stage_order)
    merges = any(case.merging for case in suite.cases)
    columns = [Column(title="verdict"), *_stage_columns(stages)]
    if merges:
        columns.append(Column(title=MERGING))
    columns.append(Column(title="time", is_number=True))
    lines = _lines(suite.cases, view.most_rows)
    rows = tuple(_row(label, cases, stages, merges=merges) for label, cases in lines)
    explained = legend(rows)
    if merges:
        explained.append(("", "", MERGING_LEGEND))
    table = ResultTable(label="case", columns=tuple(columns), rows=rows)
    origin = [time_text(suite.created), suite.host, versions_text(suite.versions)]
    return Document(
        name=suite.name,
        facts=tuple(_facts(suite)),
        origin=" · ".join(origin) if suite.command else "",
        command=command_text(suite.command),
        verdict=suite.verdict,
        sentence=suite.sentence,
        simulated=suite.simulated,
        planted=suite.planted,
        entries=_entries(suite, view.folder),
        tables=(table,) if rows else (),
        legend=tuple(explained),
        not_checked=suite.not_checked,
        unwritten=suite.unwritten,
        file="suite.json",
    )


def _facts(suite: SuiteResult) -> list[str]:
    """Return the facts of a suite, each in a few words: its cases, dtypes, workers, level, profile, time."""
    dtypes = dict.fromkeys(case.dtype for case in suite.cases if case.dtype)
    levels = dict.fromkeys(case.level for case in suite.cases if case.level)
    texts = [counted(len(suite.cases), "case"), ", ".join(dtypes), counted(len(suite.workers), "worker")]
    if levels:
        texts.append(f"level {', '.join(levels)}")
    texts += dict.fromkeys(text for case in suite.cases for text in profile_texts(case))
    texts.append(seconds(suite.elapsed_s))
    return [text for text in texts if text]


def seconds(elapsed_s: float) -> str:
    """Write a time: `0.4 s`, `12 s`."""
    return f"{elapsed_s:.1f} s" if elapsed_s < 10 else f"{elapsed_s:.0f} s"


# --- findings ---------------------------------------------------------------------------------------------------------


def _entries(suite: SuiteResult, folder: str | None) -> tuple[Entry, ...]:
    """Return the findings of a suite, each once, with the cases that have it where there are several."""
    cases_by_name = {case.name: case for case in suite.cases}
    entries = []
    for number, finding in enumerate(common_findings(suite.cases), start=1):
        cases = [cases_by_name[name] for name in finding.cases]
        # A case whose input cannot be used has no report to link to.
        reports = [(case.name, None if case.error else case.folder) for case in cases]
        shown = _shown(finding, cases[0], folder)
        entries.append(Entry(finding=shown, number=number, cases=tuple(reports) if len(reports) > 1 else ()))
    return tuple(entries)


def _shown(finding: SuiteFinding, first: CaseResult, folder: str | None) -> Finding:
    """Return a finding with its cases, and the first one's evidence, in its details, and the next command."""
    detail = finding.detail
    if len(finding.cases) > 1:
        evidence = [f"{finding.cases[0]}: {detail[0].strip()}"] if detail else []
        detail = (f"cases: {some(finding.cases)}", *evidence)
    next_step = finding.next
    if folder is not None and finding.numbers[0] in first.reproducible:
        next_step = reproduce_command(str(PurePath(folder, first.folder)), finding.numbers[0])
    return msgspec.structs.replace(finding, detail=detail, next=next_step, tensors=())


# --- the table --------------------------------------------------------------------------------------------------------

_Line = tuple[str, Sequence[CaseResult]]
"""The label of a row, and its cases."""


def _lines(cases: Sequence[CaseResult], most: int | None) -> list[_Line]:
    """Return a row per case, the worst first; of more than `most` cases those with the same outcome share a row.

    Where there are more outcomes than that, the last ones share a row by verdict.
    """
    ordered = worst_first(cases)
    if most is None or len(ordered) <= most:
        return [(case.name, [case]) for case in ordered]
    groups = list(group_by_key((_outcome(case), case) for case in ordered).values())
    shown = groups
    if len(groups) > most:
        # Room is left for a row per verdict.
        shown = groups[: most - len({case.verdict for case in ordered})]
    lines: list[_Line] = [(_label(group, total=len(cases)), group) for group in shown]
    remaining = group_by_key((case.verdict, case) for group in groups[len(shown) :] for case in group)
    for group in remaining.values():
        lines.append((f"{len(group)} of {counted(len(cases), 'case')}", group))
    return lines


def _outcome(case: CaseResult) -> object:
    """Return a key that two cases share if they have the same verdict for the same reasons."""
    causes = {(f.kind, f.workers, f.general or f.message) for f in case.findings if f.severity == "error"}
    return (case.verdict, frozenset(causes), case.headline if case.error is not None else None)


def _label(group: Sequence[CaseResult], *, total: int) -> str:
    """Return the label of a row of cases with the same outcome, of so many cases in all."""
    if group[0].verdict == "consistent":
        return f"{len(group)} of {counted(total, 'case')}"
    return f"{group[0].name} {and_more(len(group) - 1)}".rstrip()


def _row(label: str, cases: Sequence[CaseResult], stages: Sequence[str], *, merges: bool) -> Row:
    """Return the row of one case, or of several that share a row; `merges` adds the column on merging."""
    stage_cells = cells(cases[0]) if len(cases) == 1 else merged(map(cells, cases))
    row_cells: list[CellText] = [verdict_cell(cases[0].verdict)]
    row_cells += [cell_text(stage, stage_cells.get(stage)) for stage in stages]
    if merges:
        row_cells.append(plain_cell(merging_cell([merging for case in cases for merging in case.merging])))
    row_cells.append(plain_cell(seconds(sum(case.elapsed_s for case in cases))))
    folder, remark = None, ""
    if len(cases) == 1:
        case = cases[0]
        if case.error is None:
            folder = case.folder
        if case.verdict in ("incomplete", "unchecked"):
            remark = case.headline
    return Row(names=(label,), cells=tuple(row_cells), kinds=len(cases), folder=folder, remark=remark)


def cells(case: CaseResult) -> dict[str, Cell]:
    """Return a cell per stage of a case, over all of its workers; a stage that another case checked has one too."""
    by_stage = {stage: Cell(elsewhere=other_case) for stage, other_case in case.checked_elsewhere.items()}
    for stage in case.stages:
        errors = [f.kind for f in case.findings if f.severity == "error" and stage.stage in f.stages]
        by_stage[stage.stage] = Cell(
            counts=dict(stage.counts),
            worst_ratio=None if stage.worst_ratio is None else float(stage.worst_ratio),
            first_bad=stage.first_bad,
            flag=errors[0] if errors else "",
        )
    return by_stage


def document_of(result: Comparison | SuiteResult, view: View) -> Document:
    """Return the report of a run, of compared captures, or of a suite, as the formats for people have it."""
    return suite_document(result, view) if isinstance(result, SuiteResult) else comparison_document(result, view)
