"""Check a saved adapter, and say what came out: `consistency check-adapter`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consistency.capture.adapter_remarks import AdapterFlaw
from consistency.capture.names import split_name
from consistency.capture.wording import counted, layers_text, some
from consistency.case import recognition
from consistency.case.case import Case
from consistency.comparison.result import (
    ArchitectureGroup,
    Comparison,
    Finding,
    Outcome,
    TensorComparison,
    WorkerSummary,
    in_order,
    verdict_of,
    with_provenance,
)
from consistency.extras.merging.check_adapter.check import SavedAdapter, check
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.kinds import SCALING
from consistency.plugins import Statement
from consistency.worker.model.saved_adapter.contents import TensorContents
from consistency.workflows.api import AnyPath
from consistency.workflows.report_folder import output, refuse_among_weights, write_reports

SAVED_ADAPTER = "saved_adapter"
"""Stage and load path of the rows of such a check."""

_EXPERT = re.compile(r"\bexperts\.\d+\.")

_MOST_NAMED = 4


def check_adapter(
    adapter: AnyPath,
    *,
    base: AnyPath | None = None,
    against: AnyPath | None = None,
    out: AnyPath | None = None,
    allow_pickle: bool = False,
    replace: bool = False,
) -> Comparison:
    """Check whether a saved adapter is whole and trained, and whether its config says what its file holds.

    No model is made, and torch is not imported.

    Parameters
    ----------
    adapter : path
        The folder, as PEFT's `save_pretrained()` writes it.
    base : path, optional
        Folder of the base: its names and shapes are held against the adapter's.
    against : path, optional
        Another adapter, such as the checkpoint that a training was resumed from.
    out : path, optional
        Folder for the report; nothing is kept without it.
    allow_pickle : bool
        Read `.bin` weights, with `weights_only=True`.
    replace : bool
        Overwrite an earlier report in `out`.

    Raises
    ------
    ConsistencyError
        One of them cannot be read. A broken adapter is never raised: give the result to `assert_consistent`.
    """
    case = Case(name="", base="" if base is None else str(base), adapter=str(adapter), allow_pickle=allow_pickle)
    folders = [Path(folder) for folder in (adapter, base, against) if folder is not None]
    if base is not None:
        recognition.refuse_swapped_folders(Path(base), Path(adapter))
        recognition.refuse_base_without_config(Path(base), weights_alone=True)
    target = None if out is None else Path(out)
    if target is not None:
        refuse_among_weights(target, *folders)
    with output(target, replace=replace):  # refused before any work
        started = time.monotonic()
        found = check(case, None if against is None else Path(against))
        comparison = with_provenance(as_comparison(found, str(adapter), base), time.monotonic() - started)
        return write_reports(comparison, target)


def as_comparison(found: SavedAdapter, label: str, base: AnyPath | None) -> Comparison:
    """Return the result as a report has it."""
    findings = in_order([*_broken(found), *_flaws(found), *_notes(found)])
    dtypes = sorted({tensor.dtype for tensor in found.contents})
    return Comparison(
        case=label,
        base="" if base is None else str(base),
        adapter=label,
        dtype=", ".join(dtypes),
        level="every element",
        load_paths=(SAVED_ADAPTER,),
        verdict=verdict_of(findings, incomplete=False),
        reference=label,
        workers=(WorkerSummary(name=label, load_path=SAVED_ADAPTER, architecture="weights", model="", status="ok"),),
        architectures=(ArchitectureGroup(name="weights", workers=(label,)),),
        tensors=tuple(_row(tensor, found, label) for tensor in found.contents),
        findings=findings,
    )


def _row(tensor: TensorContents, found: SavedAdapter, label: str) -> TensorComparison:
    layer, name = (tensor.layer, tensor.part) if tensor.layer else split_name(tensor.key)
    is_wrong = bool(tensor.not_finite)
    evidence: dict[str, Any] = {"largest": tensor.largest}
    if tensor.layer in found.layers:
        evidence["adapted"] = True
        evidence["tells_training"] = found.is_method_known
    if found.untrained.get(tensor.layer) == tensor.part:
        evidence["adds_nothing"] = True
    row = Outcome(
        workers=(label,),
        reference=label,
        status="outside" if is_wrong else "equal",
        reason=f"{counted(tensor.not_finite, 'element')} NaN or infinite" if is_wrong else None,
        evidence=evidence,
    )
    return TensorComparison(
        stage=SAVED_ADAPTER,
        load_path=SAVED_ADAPTER,
        layer=layer,
        tensor=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        rule="bitwise",
        classes=((label,),),
        outcomes=(row,),
    )


def _broken(found: SavedAdapter) -> Iterator[Finding]:
    if found.not_finite:
        texts = [f"{tensor.not_finite} of {tensor.key}" for tensor in found.not_finite]
        yield Finding(
            kind=MergeCause.ADAPTER_NOT_FINITE,
            severity="error",
            message=MergeCause.ADAPTER_NOT_FINITE.sentence(some(texts, _MOST_NAMED)),
            next=MergeCause.ADAPTER_NOT_FINITE.todo,
        )


def _flaws(found: SavedAdapter) -> Iterator[Finding]:
    for remark in found.remarks:
        is_wrong = remark.flaw == AdapterFlaw.ONE_SHARD
        if remark.flaw == AdapterFlaw.UNTRAINED_LAYERS:
            # no token may have reached an expert, which then is as it began
            is_wrong = not all(_EXPERT.search(layer) for layer in found.untrained)
        yield Finding(
            kind=remark.flaw,
            severity="error" if is_wrong else remark.severity,
            message=remark.text,
            next=remark.next,
        )


def _notes(found: SavedAdapter) -> Iterator[Finding]:
    if found.scalings:
        texts = [f"{scaling:g} in {layers_text(layers)}" for scaling, layers in sorted(found.scalings.items())]
        yield Finding(kind=SCALING, severity="note", message=f"scaling, as PEFT reads it: {some(texts, _MOST_NAMED)}")
    if found.computes:
        yield Finding(
            kind=AdapterFlaw.COMPUTED_ON_LOADING,
            severity="warning",
            message=found.computes,
            next=AdapterFlaw.COMPUTED_ON_LOADING.todo,
        )
    if found.relation is not None:
        yield Finding(
            kind=AdapterFlaw.OTHER_TRAINING,
            severity="note" if found.relation.is_same_training else "warning",
            message=f"against the other adapter: {found.relation.sentence}",
            next=None if found.relation.is_same_training else AdapterFlaw.OTHER_TRAINING.todo,
        )


def statement(comparison: Comparison) -> Statement:
    """Return what a saved adapter is, and the verdict in one sentence."""
    by_tensor = [(tensor, tensor.outcomes[-1].evidence) for tensor in comparison.tensors]
    layers = {tensor.layer for tensor, evidence in by_tensor if evidence.get("adapted")}
    inert = {tensor.layer for tensor, evidence in by_tensor if evidence.get("adds_nothing")}
    parts = [f"{counted(len(by_tensor), 'tensor')} of {counted(len(layers), 'adapted layer')}"]
    if inert:
        parts.append(f"{len(inert)} of them {'adds' if len(inert) == 1 else 'add'} nothing")
    if not any(evidence.get("tells_training") for _, evidence in by_tensor):
        parts.append("whether they were trained cannot be told of this method")
    if not comparison.base:
        parts.append("without --base nothing is said of layers that it lacks")
    return Statement(heading=_heading(comparison, inert == layers), sentence="; ".join(parts))


def _heading(comparison: Comparison, adds_nothing: bool) -> str:
    """Return the gravest flaw in two or three words."""
    flaws = [finding.kind for finding in comparison.findings if finding.severity == "error"]
    if not flaws:
        return "NO FLAW FOUND"
    if MergeCause.ADAPTER_NOT_FINITE in flaws:
        return "BROKEN"
    if AdapterFlaw.UNTRAINED_LAYERS in flaws:
        return "UNTRAINED" if adds_nothing else "PARTLY UNTRAINED"
    if AdapterFlaw.ONE_SHARD in flaws:
        return "NOT WHOLE"
    return "DOES NOT FIT ITS CONFIG"
