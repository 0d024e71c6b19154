"""A comparison of captures as a document."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from consistency.capture.wording import and_more, counted, some
from consistency.case.load_path import is_alternative
from consistency.case.stages import SPECS, Stage
from consistency.comparison.layers import LayerCell, layers_of
from consistency.comparison.result import Comparison, WorkerSummary
from consistency.report import summary
from consistency.report.document import Column, Document, Group, ResultTable, Row, Sheet, numbered
from consistency.report.findings import findings_of
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
    legend,
    not_checked_texts,
    origin_texts,
    sentence,
    source_texts,
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
    found = summary.all_groups(comparison) if view.groups is None else view.groups
    lines = [line.cells for some in found.values() for group in some for line in group.lines]
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
        legend=tuple(legend(lines)),
        remarks=(*alternative_path_texts(comparison), *(("", text) for text in remarks)),
        merging=tuple(merging_texts(comparison.merging)),
        not_checked="".join(not_checked_texts(comparison)),
        layers=_layers(comparison),
        environment=tuple(environment_texts(comparison.workers)),
    )


def tables(comparison: Comparison, found: Mapping[str, Sequence[summary.Architecture]]) -> tuple[ResultTable, ...]:
    """Return a table per default load path: the workers of each architecture, and a cell per stage."""
    names = summary.stages(comparison)
    short = {spec.stage.value: spec.short for spec in SPECS.values()}
    columns = tuple(Column(title=name, short=short.get(name, "")) for name in names)
    mains = {path: groups for path, groups in found.items() if not is_alternative(path)}
    return tuple(
        ResultTable(
            label="workers",
            heading="architecture",
            title=f"load path: {path}" if len(mains) > 1 else "",
            columns=columns,
            groups=tuple(_group(group, names) for group in groups),
            reference=comparison.reference,
        )
        for path, groups in mains.items()
    )


def _group(group: summary.Architecture, stages: Sequence[str]) -> Group:
    rows = (
        Row(names=line.workers, kinds=line.kinds, cells=tuple(cell_text(name, line.cells.get(name)) for name in stages))
        for line in group.lines
    )
    return Group(title=group.architecture, models=group.models, rows=tuple(rows))


def _layers(comparison: Comparison) -> Sheet | None:
    """Return the layers nearest to their tolerance or beyond it, by architecture."""
    layers = [one for one in layers_of(comparison) if one.stage != Stage.OPERATORS and not one.is_equal]
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
