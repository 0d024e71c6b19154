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
from consistency.comparison.outcomes import gathered
from consistency.comparison.result import Comparison, Finding, WorkerSummary
from consistency.comparison.suite import CaseResult, SuiteFinding, SuiteResult, common_findings, worst_first
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


def of_comparison(comparison: Comparison, view: View) -> Document:
    """Return the report of a run, or of captures that were compared."""
    found = summary.all_rows(comparison) if view.rows is None else view.rows
    told = [worker for worker in comparison.workers if worker.environment.get("inputs")]
    inputs = [f"inputs: {_values(told, 'inputs')}"] if told else []
    remarks = [*agreement_texts(comparison, found), *divergence_texts(comparison), *inputs]
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
        tables=tables(comparison, found),
        legend=tuple(legend(row for rows in found.values() for row in rows)),
        remarks=(*alternative_path_texts(comparison), *(("", text) for text in remarks)),
        merging=tuple(merging_texts(comparison.merging)),
        not_checked=comparison.not_checked,
        not_checked_title=f"not checked (level {comparison.level})",
        layers=_layers(comparison),
        environment=tuple(environment_texts(comparison.workers)),
    )


def tables(comparison: Comparison, found: Rows) -> tuple[ResultTable, ...]:
    """Return a table per default load path: the workers of each architecture, and a cell per stage."""
    short: dict[str, str] = {spec.stage: spec.short for spec in SPECS.values()}
    columns = tuple(Column(title=name, short=short.get(name, "")) for name in summary.stages(comparison))
    mains = {path: rows for path, rows in found.items() if not is_alternative(path)}
    return tuple(
        ResultTable(
            label="workers",
            heading="architecture",
            title=f"load path: {path}" if len(mains) > 1 else "",
            columns=columns,
            rows=tuple(rows),
            reference=comparison.reference,
        )
        for path, rows in mains.items()
    )


def _layers(comparison: Comparison) -> Sheet | None:
    """Return the layers nearest to their tolerance or beyond it, by architecture."""
    layers = [one for one in layers_of(comparison) if one.stage != standard.OPERATORS and not one.is_equal]
    worst = heapq.nlargest(_LAYERS, layers, key=lambda one: one.badness)
    if not worst:
        return None
    bad = sum(tensor.is_wrong for tensor in comparison.tensors)
    names = [group.name for group in comparison.architectures]
    left = f" (of {len(names)} architectures {_ARCHITECTURES})" if len(names) > _ARCHITECTURES else ""
    title = f"mismatch in {counted(bad, 'tensor')}, the worst" if bad else "worst tensors"
    rows = []
    for one in worst:
        path = f" ({one.load_path})" if one.load_path != comparison.load_paths[0] else ""
        rows.append((one.name + path, *(_figures(one.architectures.get(name)) for name in names[:_ARCHITECTURES])))
    titles = (f"{title}: difference / allowed, ratio{left}", *names[:_ARCHITECTURES])
    return Sheet(titles=titles, rows=tuple(rows))


def _figures(cell: LayerCell | None) -> str:
    if cell is None:
        return ""
    return f"{cell_figures(cell)} {devices_text(cell)}" if len(cell.classes) > 1 else cell_figures(cell)


def environment_texts(workers: Sequence[WorkerSummary]) -> Iterator[str]:
    """Yield versions and devices as `torch.utils.collect_env` lays them out, which trackers ask for."""
    yield from (f"{title}: {_values(workers, name)}" for title, name in _VERSIONS)
    drivers = dict.fromkeys(worker.driver for worker in workers if worker.driver)
    yield f"Nvidia driver version: {'; '.join(map(str, drivers)) or 'N/A'}"
    devices = dict.fromkeys(
        f"{worker.name}: {worker.model} ({worker.architecture}){' simulated' if worker.simulated else ''}"
        for worker in workers
    )
    yield from list(devices)[:_DEVICES]
    yield from filter(None, [and_more(len(devices) - _DEVICES, "device")])
    yield from (f"[pip3] {name}=={_values(workers, name)}" for name in _LIBRARIES)


def _values(workers: Sequence[WorkerSummary], name: str) -> str:
    """Return the value of a name in the environments; where they differ, each with its workers."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        value = worker.environment.get(name)
        found.setdefault("N/A" if value is None else str(value), []).append(worker.name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{value} ({some(names, 4)})" for value, names in found.items()) or "N/A"


def of_suite(suite: SuiteResult, view: View) -> Document:
    """Return the report of a suite; the commands in it name the folder of the view."""
    stages = sorted({stage.stage for case in suite.cases for stage in case.stages}, key=stage_order)
    merges = any(case.merging for case in suite.cases)
    lines = _lines(suite.cases, view.most_rows)
    rows = tuple(_row(label, cases, stages, merges=merges) for label, cases in lines)
    short: dict[str, str] = {spec.stage: spec.short for spec in SPECS.values()}
    columns = [Column(title="verdict"), *(Column(title=name, short=short.get(name, "")) for name in stages)]
    columns += [Column(title=MERGING)] if merges else []
    explained = legend(rows)
    table = ResultTable(
        label="case",
        columns=(*columns, Column(title="time", is_number=True)),
        rows=rows,
    )
    about = [time_text(suite.created), suite.host, versions_text(suite.versions)]
    return Document(
        name=suite.name,
        facts=tuple(_facts(suite)),
        origin=" · ".join(about) if suite.command else "",
        command=command_text(suite.command),
        verdict=suite.verdict,
        sentence=suite.sentence,
        simulated=suite.simulated,
        planted=suite.planted,
        entries=_entries(suite, view.folder),
        tables=(table,) if rows else (),
        legend=(*explained, *([("", "", MERGING_LEGEND)] if merges else [])),
        not_checked=suite.not_checked,
        unwritten=suite.unwritten,
        file="suite.json",
    )


def _facts(suite: SuiteResult) -> list[str]:
    """Return what was checked, in a few words each."""
    dtypes = dict.fromkeys(case.dtype for case in suite.cases if case.dtype)
    levels = dict.fromkeys(case.level for case in suite.cases if case.level)
    found = [counted(len(suite.cases), "case"), ", ".join(dtypes), counted(len(suite.workers), "worker")]
    found += [f"level {', '.join(levels)}" if levels else ""]
    found += dict.fromkeys(text for case in suite.cases for text in profile_texts(case))
    return [text for text in (*found, seconds(suite.elapsed_s)) if text]


def seconds(elapsed_s: float) -> str:
    """Write a time: `0.4 s`, `12 s`."""
    return f"{elapsed_s:.1f} s" if elapsed_s < 10 else f"{elapsed_s:.0f} s"


# --- findings ---------------------------------------------------------------------------------------------------------


def _entries(suite: SuiteResult, folder: str | None) -> tuple[Entry, ...]:
    cases = {case.name: case for case in suite.cases}
    found = []
    for number, one in enumerate(common_findings(suite.cases), start=1):
        members = [cases[name] for name in one.cases]
        related = [(case.name, None if case.error else case.folder) for case in members]
        finding = _shown(one, members[0], folder)
        found.append(Entry(finding=finding, number=number, cases=tuple(related) if len(related) > 1 else ()))
    return tuple(found)


def _shown(found: SuiteFinding, first: CaseResult, folder: str | None) -> Finding:
    """Return a finding with its cases, and the first one's evidence, in its details, and the next command."""
    detail = found.detail
    if len(found.cases) > 1:
        evidence = [f"{found.cases[0]}: {detail[0].strip()}"] if detail else []
        detail = (f"cases: {some(found.cases)}", *evidence)
    todo = found.next
    if folder is not None and found.numbers[0] in first.reproducible:
        todo = reproduce_command(str(PurePath(folder, first.folder)), found.numbers[0])
    return msgspec.structs.replace(found, detail=detail, next=todo, tensors=())


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
    outcomes = gathered((_outcome(case), case) for case in ordered)
    same = list(outcomes.values())
    shown = same if len(same) <= most else same[: most - len({case.verdict for case in ordered})]
    rest = [case for members in same[len(shown) :] for case in members]
    lines: list[_Line] = [(_label(members, of=len(cases)), members) for members in shown]
    for verdict in dict.fromkeys(case.verdict for case in rest):
        left = [case for case in rest if case.verdict == verdict]
        lines.append((f"{len(left)} of {counted(len(cases), 'case')}", left))
    return lines


def _outcome(case: CaseResult) -> object:
    """Return what two cases with the same outcome have in common: the verdict and the causes of it."""
    causes = {(f.kind, f.workers, f.general or f.message) for f in case.findings if f.severity == "error"}
    return (case.verdict, frozenset(causes), case.headline if case.error is not None else None)


def _label(same: Sequence[CaseResult], *, of: int) -> str:
    if same[0].verdict == "consistent":
        return f"{len(same)} of {counted(of, 'case')}"
    return f"{same[0].name} {and_more(len(same) - 1)}".rstrip()


def _row(label: str, cases: Sequence[CaseResult], stages: Sequence[str], *, merges: bool) -> Row:
    found = _cells(cases)
    cells: list[CellText] = [verdict_cell(cases[0].verdict)]
    cells += [cell_text(stage, found.get(stage)) for stage in stages]
    cells += [plain_cell(merging_cell([one for case in cases for one in case.merging]))] if merges else []
    cells.append(plain_cell(seconds(sum(case.elapsed_s for case in cases))))
    one = cases[0] if len(cases) == 1 else None
    return Row(
        names=(label,),
        cells=tuple(cells),
        kinds=len(cases),
        folder=one.folder if one is not None and one.error is None else None,
        remark=one.headline if one is not None and one.verdict in ("incomplete", "unchecked") else "",
    )


def _cells(cases: Sequence[CaseResult]) -> dict[str, Cell]:
    return cells(cases[0]) if len(cases) == 1 else merged(map(cells, cases))


def cells(case: CaseResult) -> dict[str, Cell]:
    """Return the cell of each stage of a case, over all of its workers, also of those that another case checked."""
    elsewhere = {stage: Cell(elsewhere=other) for stage, other in case.checked_elsewhere.items()}
    return elsewhere | {
        stage.stage: Cell(
            counts=dict(stage.counts),
            worst_ratio=None if stage.worst_ratio is None else float(stage.worst_ratio),
            first_bad=stage.first_bad,
            flag=next((f.kind for f in case.findings if f.severity == "error" and stage.stage in f.stages), ""),
        )
        for stage in case.stages
    }


def document_of(found: Comparison | SuiteResult, view: View) -> Document:
    """Return what the formats for people say of a run, of compared captures, or of a suite."""
    return of_suite(found, view) if isinstance(found, SuiteResult) else of_comparison(found, view)
