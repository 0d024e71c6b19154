"""Judge what each rank holds of a tensor that several hold in parts, and what the library puts together from these.

A rank is wrong about its own part alone, so each judges what it holds: who is named is who holds something else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from consistency.capture.names import (
    RANK_AND_SCALING,
    WHOLE_MODEL,
    adapter_place,
    module_place,
    split_name,
)
from consistency.capture.records import TensorRecord
from consistency.capture.wording import listed, some
from consistency.case.stage import Stage
from consistency.extras.training.ranks.group import Joined
from consistency.extras.training.ranks.parts import RankPart, held, part_of, whole
from consistency.extras.training.step_judging import record_part
from consistency.numerics import words
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.diagnosis_moved import Known, diagnose_moved, diagnose_structure
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.error import measure_against_exact
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rules import Rule
from consistency.worker.context import Context
from consistency.worker.judging.block_rule import record_block, spread_of
from consistency.worker.judging.gradients import row_of
from consistency.worker.model.adapter_settings import rank_and_scaling
from consistency.worker.model.float64_reference import Reference

HELD, GATHERED = "held", "gathered"
"""Suffixes of a tensor: the part that a rank holds, and what the library puts together from all of them."""


def record_held(context: Context, ranks: Joined, stage: Stage, model: torch.nn.Module, names: Collection[str]) -> str:
    """Record whether what this rank holds is that part of the file, and of the model that this worker has by itself.

    Parameters
    ----------
    names : collection of str
        Of the adapter's tensors.

    Returns
    -------
    str
        Which ranks hold something else: nothing that is computed with it can be judged. Empty where none does.
    """
    alone, equal, split, wrong = dict(context.model.named_parameters()), 0, 0, False
    for name, parameter in model.named_parameters():
        if name not in alone:
            continue
        own, part = held(parameter), part_of(parameter, rank=ranks.rank, world=ranks.world)
        if 0 in part.shape:  # fewer rows than ranks
            continue
        of_adapter = name in names
        split += of_adapter and part.dim is not None
        all_of_it = context.expected[name][1].to(own.dtype) if of_adapter else alone[name].detach()
        expected = part.of(all_of_it)
        if digest(own).value == digest(expected).value:
            equal += 1
            continue
        wrong = True
        layer, tensor = adapter_place(context.expected[name][0]) if of_adapter else split_name(module_place(name))
        record_difference(
            context, stage, layer, f"{tensor}.{HELD}", own, expected, known=other_parts(ranks, parameter, all_of_it)
        )
    wrong |= _record_settings(context, stage, model)
    context.record.fact(
        stage,
        WHOLE_MODEL,
        HELD,
        status="within" if wrong else "equal",
        evidence={"equal": equal, "split": split, "ranks": list(ranks.names)},
    )
    return who_else(ranks, "something else than the files say is held", is_here=wrong)


def who_else(ranks: Joined, what: str, *, is_here: bool) -> str:
    """Return on which ranks something is the case, as a reason to judge nothing that follows; empty where on none."""
    answers = ranks.answers(what, "yes" if is_here else "")
    where = [rank for rank, answer in zip(ranks.group.ranks, answers, strict=True) if answer]
    return f"{what} on {some(where)}" if where else ""


def record_difference(
    context: Context,
    stage: Stage,
    layer: str,
    tensor: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    known: Known,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Record, as a fact of this rank alone, how what it has of a tensor differs from what it should have."""
    host, wanted = actual.to("cpu").contiguous(), expected.to("cpu").contiguous()
    diagnosis = diagnose_structure(host, wanted)
    more: dict[str, Any] = dict(evidence or {})
    if diagnosis is None:
        found = measure(host, wanted)
        diagnosis = diagnose_moved(host, wanted, found, known=known)
        more |= {"wrong_elements": found.mismatched, "of": host.numel()}
    context.record.fact(
        stage, layer, tensor, status="outside", word=diagnosis.word, evidence={**more, **diagnosis.evidence}
    )


def other_parts(ranks: Joined, parameter: torch.Tensor, whole_tensor: torch.Tensor) -> Known:
    """Return what a rank may hold in place of its part: that of another one."""
    parts = {
        digest(part_of(parameter, rank=number, world=ranks.world).of(whole_tensor)).value: f"the part of {rank}"
        for number, rank in enumerate(ranks.group.ranks)
    }
    return Known(swapped=lambda tensor: parts.get(digest(tensor).value))


def _record_settings(context: Context, stage: Stage, model: torch.nn.Module) -> bool:
    """Record the layers whose rank or scaling is another than in the model that this worker has by itself."""
    alone, here = rank_and_scaling(context.model), rank_and_scaling(model)
    wrong = [layer for layer, settings in here.items() if alone.get(layer, settings) != settings]
    for layer in wrong:
        context.record.fact(
            stage,
            layer,
            RANK_AND_SCALING,
            status="outside",
            word=words.SETTINGS,
            evidence={"got": here[layer], "wanted": alone[layer]},
            reason=f"rank and scaling are {listed([*map(str, here[layer])])}, not {listed([*map(str, alone[layer])])}",
        )
    return bool(wrong)


def record_gathered(context: Context, stage: Stage, model: torch.nn.Module, names: Collection[str]) -> None:
    """Record whether the parts of the adapter's tensors, put together by the library, are the bytes of the file."""
    for name in names:
        gathered = whole(model.get_parameter(name))
        layer, part = adapter_place(context.expected[name][0])
        expected = context.expected[name][1].to(gathered.dtype)
        row = TensorRecord(stage, layer, f"{part}.{GATHERED}", rule=Rule.BITWISE, status="equal")
        context.record.moved(row, actual=gathered, expected=expected)


def record_gradient(
    context: Context,
    stage: Stage,
    name: str,
    actual: torch.Tensor,
    *,
    reference: Reference,
    part: RankPart,
    ending: str,
) -> None:
    """Record a gradient that every rank has as a row, and a part of one as a fact of this rank.

    Parameters
    ----------
    actual : torch.Tensor
        On the CPU, of `part.shape`.
    reference : Reference
        The whole one in float64, and what rounding makes in it.
    ending : str
        See `Joined.of_so_many`.
    """
    layer, tensor = row_of(context, name)
    place = f"{tensor}{ending}"
    if not context.record.wants(stage, layer):
        return
    if part.dim is None:
        row = TensorRecord(stage, layer, place, rule=Rule.BLOCK, status="measured")
        record_block(context, row, actual, reference=reference, name=name)
        return
    exact, spread = reference.read(name), spread_of(context, reference, name)
    tolerance = context.record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    if 0 in part.shape or exact is None:
        return
    if spread is None and tolerance is None:
        context.record.fact(stage, layer, place, status="skipped", reason="what rounding makes in it is unknown")
        return
    truth = part.of(mapped(exact))
    mine = None if spread is None or tolerance is not None else spread.of_part(part.of, part.whole)
    limit = tolerance if mine is None else mine.allowed(truth, actual.dtype)
    found = measure_against_exact(actual, truth, limit)
    record_part(
        context,
        stage,
        layer,
        place,
        found=found,
        chunks=lambda: exact_chunks(actual, truth, limit),
        share=float(found.ratio or 0) if mine is None else mine.figures(actual, truth).ratio,
    )
