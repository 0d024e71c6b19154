"""The text and the JSON of a budget, for `--plan`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from consistency.capture.wording import counted, size
from consistency.case.budget.estimate import StageEstimate, WorkerEstimate
from consistency.case.budget.fit import ON_DISK, Budget
from consistency.case.budget.shape import Shape
from consistency.errors import ConsistencyError
from consistency.text import clean, one_line

SCHEMA = "consistency.plan/2"
SUITE_SCHEMA = "consistency.plan-suite/2"

_COLUMNS = "{:28}{:>13}{:>13}{:>13}"


def as_table(budget: Budget) -> dict[str, Any]:
    """Return a budget as a table for JSON: sizes in bytes, null for those that are unknown."""
    shape = {field.name: getattr(budget.shape, field.name) for field in dataclasses.fields(Shape)}
    layers, unknown = shape.pop("layers"), shape.pop("unknown")
    return {
        "schema": SCHEMA,
        "case": budget.case.name,
        "model": {**shape, "adapted_layers": len(layers)},
        "host": {
            "available_bytes": budget.host_available_bytes,
            "private_bytes": budget.host_private_bytes,
            "mapped_bytes": budget.host_mapped_bytes,
        },
        "workers": [msgspec.to_builtins(worker) for worker in budget.workers],
        "workers_at_a_time": budget.at_once,
        "scratch": {"bytes": budget.scratch_bytes, "in_memory": budget.scratch_in_memory},
        "fit": msgspec.to_builtins(budget.case.fit),
        "changes": budget.changes,
        "not_checked": budget.not_checked,
        "refusal": None if budget.refusal is None else budget.refusal.parts,
        "unknown": tuple(dict.fromkeys((*unknown, *budget.unknown))),
    }


def render(budget: Budget) -> str:
    """Return a budget as text: the model, each worker stage by stage, all together, and what was changed to fit."""
    lines = [f"consistency plan · {one_line(budget.case.name)} · level {budget.case.level}", ""]
    lines += [f"  {line}" for line in _model(budget.shape)]
    for worker in budget.workers:
        lines += ["", *_worker(worker)]
    lines += ["", *_together(budget)]
    for title, texts in (
        ("changed to fit", budget.changes),
        ("not checked because of that", budget.not_checked),
        ("not estimated", budget.unknown),
    ):
        if texts:
            lines += ["", f"  {title}", *(f"    {one_line(text)}" for text in texts)]
    if budget.refusal is not None:
        lines += ["", "  does not fit: this case would be refused", *_indented(clean(str(budget.refusal)))]
    elif not budget.changes:
        lines += ["", "  fits in memory: nothing will be skipped for lack of it"]
    return "\n".join(lines) + "\n"


def suite_as_table(name: str, budgets: Mapping[str, Budget | ConsistencyError], at_once: int) -> dict[str, Any]:
    """Return the budgets of a suite, of which `at_once` cases run at a time, as a table for JSON.

    A case that cannot be checked has the reason in the place of a budget.
    """
    cases = {}
    for case, budget in budgets.items():
        cases[case] = {"refusal": budget.parts} if isinstance(budget, ConsistencyError) else as_table(budget)
    return {"schema": SUITE_SCHEMA, "suite": name, "cases": cases, "cases_at_a_time": at_once}


def render_suite(name: str, budgets: Mapping[str, Budget | ConsistencyError], at_once: int) -> str:
    """Return the budgets of a suite as text: a line per case, and the most expensive one in full."""
    lines = [f"consistency plan · {one_line(name)} · {counted(len(budgets), 'case')}", ""]
    lines.append("  " + _COLUMNS.format("case", "host private", "host mapped", "device"))
    estimated = []
    for case, budget in budgets.items():
        if isinstance(budget, ConsistencyError):
            lines.append(f"  {one_line(case)}: cannot be checked: {_reason(budget)}")
            continue
        estimated.append(budget)
        device_bytes = max((worker.device_bytes or 0 for worker in budget.workers), default=0)
        sizes = (budget.host_private_bytes, budget.host_mapped_bytes, device_bytes)
        note = "" if budget.refusal is None else f"  refused: {one_line(budget.refusal.what)}"
        lines.append("  " + _COLUMNS.format(one_line(case), *map(_size, sizes)) + note)
    if not estimated:
        return "\n".join(lines) + "\n"
    beside = f", {at_once} at a time" if at_once > 1 else ""
    lines += ["", f"  together  workers are started once and take the cases in turn{beside}", ""]
    text = "\n".join(lines)
    largest = max(estimated, key=lambda budget: budget.host_private_bytes)
    return f"{text}\nThe case that needs the most memory:\n\n{render(largest)}"


def _reason(error: ConsistencyError) -> str:
    """Return an error in one line, with its place."""
    return one_line(error.what if error.where is None else f"{error.what} ({error.where})")


def _model(shape: Shape) -> Iterator[str]:
    """Yield a line for the base and one for the adapter, where there are such."""
    if shape.elements:
        converted = f", {size(shape.converted_bytes)} of them converted" if shape.converted_bytes else ""
        yield (
            f"base      {_millions(shape.elements)} parameters, {size(shape.loaded_bytes)} in {shape.dtype}"
            f"{converted}; "
            f"{counted(shape.blocks, 'block')}, largest tensor {size(shape.largest_elements * shape.width)}"
        )
    if shape.adapter_bytes:
        ranks = sorted({layer.rank for layer in shape.layers if layer.rank is not None})
        rank = f" of rank {', '.join(map(str, ranks))}" if ranks else ""
        yield (
            f"adapter   {one_line(shape.method)}{rank} on {counted(len(shape.layers), 'layer')}, "
            f"{size(shape.adapter_bytes)}"
        )


def _millions(count: int) -> str:
    """Write a number of parameters: `206`, `0.206 M`, `8 B`."""
    if count < 1000:
        return str(count)
    return f"{count / 1e9:.3g} B" if count >= 0.9995e9 else f"{count / 1e6:.3g} M"  # three digits of millions


def _worker(worker: WorkerEstimate) -> Iterator[str]:
    """Yield the lines of a worker: what each stage needs, and the peaks."""
    notes = []
    if worker.makes_reference:
        notes.append("reference")
    if worker.placement == "offload":
        notes.append("offload")
    name = one_line(worker.worker)
    if notes:
        name += f" ({', '.join(notes)})"
    yield "  " + _COLUMNS.format(name, "host private", "host mapped", "device")
    for stage in worker.stages:
        sizes = (stage.host_private_bytes, stage.host_mapped_bytes, stage.device_bytes)
        yield "  " + _COLUMNS.format(f"  {stage.stage}", *map(_size, sizes)) + _passes(stage)
    peaks = (worker.host_private_bytes, worker.host_mapped_bytes, worker.device_bytes)
    yield "  " + _COLUMNS.format("  peaks", *map(_size, peaks))
    if worker.device_bytes is not None:
        memory = "of unknown size"
        if worker.device_memory_bytes is not None:
            memory = f"with {size(worker.device_memory_bytes)}"
        yield f"    a device {memory}"


def _passes(stage: StageEstimate) -> str:
    """Return the number of passes of a stage, and of the blocks that they compute; empty where it declares none."""
    if not stage.passes:
        return ""
    blocks = max(passes.blocks for passes in stage.passes)
    over = f" over {counted(blocks, 'block')}" if blocks else ""
    count = sum(passes.count for passes in stage.passes)
    noun = "pass" if count == 1 else "passes"
    return f"   {count} {noun}{over}"


def _together(budget: Budget) -> Iterator[str]:
    """Yield the memory of all workers that run at a time, and the space for temporary files."""
    available = "an unknown amount of memory"
    if budget.host_available_bytes is not None:
        available = f"{size(budget.host_available_bytes)} available on this host"
    yield (
        f"  together  {counted(budget.at_once, 'worker')} at a time: {size(budget.host_private_bytes)} private and "
        f"{size(budget.host_mapped_bytes)} mapped, of {available}"
    )
    if budget.scratch_bytes:
        where = "in memory, and part of the private memory" if budget.scratch_in_memory else "on disk"
        yield f"  scratch   {size(budget.scratch_bytes)} of temporary files ({tempfile.gettempdir()}), {where}"
        if budget.scratch_in_memory:
            yield f"            {ON_DISK}"


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _size(count: int | None) -> str:
    """Write a number of bytes; a dash where there are none, or where that is unknown."""
    return "–" if not count else size(count)
