"""Judge each rank's part of a tensor that several ranks hold in parts, and the whole that the library makes of these.

A rank is wrong about its own part alone, so each judges its own: a report names the ranks that hold something else.
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
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.capture.wording import listed, some
from consistency.case.stage import Stage
from consistency.extras.training.ranks.group import JoinedGroup
from consistency.extras.training.ranks.parts import RankPart, gather, local_part, part_of
from consistency.extras.training.step_judging import record_part
from consistency.numerics import words
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.diagnosis_moved import OtherContents, diagnose_moved, diagnose_structure
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
from consistency.worker.recorder import UserTolerance

HELD, GATHERED = "held", "gathered"
"""Suffixes of a tensor: the part that a rank holds, and the whole that the library puts together from all parts."""


def record_held(
    context: Context, ranks: JoinedGroup, stage: Stage, model: torch.nn.Module, names: Collection[str]
) -> str:
    """Record whether this rank holds its part of the file, and of the model that this worker has by itself.

    Parameters
    ----------
    names : collection of str
        Names of the adapter's parameters.

    Returns
    -------
    str
        Which ranks hold something else: nothing that is computed with it can be judged. Empty where none does.
    """
    whole_parameters = dict(context.model.named_parameters())
    equal_count, split_count, is_wrong = 0, 0, False
    for name, parameter in model.named_parameters():
        # the model by itself has nothing to compare it with
        if name not in whole_parameters:
            continue
        actual, part = local_part(parameter), part_of(parameter, rank=ranks.rank, world=ranks.world)
        if 0 in part.shape:  # fewer rows than ranks
            continue
        is_of_adapter = name in names
        if is_of_adapter:
            split_count += part.dim is not None
            # a model may hold an adapter in another dtype than its file
            whole = context.expected[name][1].to(actual.dtype)
        else:
            whole = whole_parameters[name].detach()
        expected = part.cut_from(whole)
        if digest(actual).value == digest(expected).value:
            equal_count += 1
            continue
        is_wrong = True
        layer, tensor = _place(context, name, is_of_adapter=is_of_adapter)
        other_contents = other_parts(ranks, parameter, whole)
        record_difference(context, stage, layer, f"{tensor}.{HELD}", actual, expected, other_contents=other_contents)
    is_wrong |= _record_settings(context, stage, model)
    # within, for each wrong tensor has a fact of its own that is outside
    status: RecordStatus = "within" if is_wrong else "equal"
    evidence = {"equal": equal_count, "split": split_count, "ranks": list(ranks.names)}
    context.record.fact(stage, WHOLE_MODEL, HELD, status=status, evidence=evidence)
    return reason_on_ranks(ranks, "the ranks hold other values than the files", is_here=is_wrong)


def _place(context: Context, name: str, *, is_of_adapter: bool) -> tuple[str, str]:
    """Return layer and tensor of a parameter."""
    return adapter_place(context.expected[name][0]) if is_of_adapter else split_name(module_place(name))


def reason_on_ranks(ranks: JoinedGroup, reason: str, *, is_here: bool) -> str:
    """Return a reason to judge nothing that follows, with the ranks where it holds; empty where it holds on none.

    Every rank has to call this: each tells the others whether the reason holds on it.
    """
    own_answer = "yes" if is_here else ""
    answers = ranks.exchange(reason, own_answer)
    affected = [rank for rank, answer in zip(ranks.group.ranks, answers, strict=True) if answer]
    return f"{reason} on {some(affected)}" if affected else ""


def record_difference(
    context: Context,
    stage: Stage,
    layer: str,
    tensor: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    other_contents: OtherContents,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Record, as a fact of this rank alone, how its tensor differs from the expected one."""
    actual, expected = actual.to("cpu").contiguous(), expected.to("cpu").contiguous()
    all_evidence: dict[str, Any] = dict(evidence or {})
    diagnosis = diagnose_structure(actual, expected)
    if diagnosis is None:
        measured = measure(actual, expected)
        diagnosis = diagnose_moved(actual, expected, measured, other_contents=other_contents)
        all_evidence |= {"wrong_elements": measured.mismatched, "of": actual.numel()}
    all_evidence |= diagnosis.evidence
    context.record.fact(stage, layer, tensor, status="outside", word=diagnosis.word, evidence=all_evidence)


def other_parts(ranks: JoinedGroup, parameter: torch.Tensor, whole: torch.Tensor) -> OtherContents:
    """Return the contents that a rank may hold in place of its own part: the parts of other ranks."""
    name_by_digest = {}
    for number, rank in enumerate(ranks.group.ranks):
        part = part_of(parameter, rank=number, world=ranks.world)
        name_by_digest[digest(part.cut_from(whole)).value] = f"the part of {rank}"
    return OtherContents(swapped=lambda tensor: name_by_digest.get(digest(tensor).value))


def _record_settings(context: Context, stage: Stage, model: torch.nn.Module) -> bool:
    """Record the layers whose rank or scaling is another than in the model that this worker has by itself."""
    expected, actual = rank_and_scaling(context.model), rank_and_scaling(model)
    wrong_layers = [layer for layer, settings in actual.items() if expected.get(layer, settings) != settings]
    for layer in wrong_layers:
        actual_text, expected_text = (listed([*map(str, settings[layer])]) for settings in (actual, expected))
        context.record.fact(
            stage,
            layer,
            RANK_AND_SCALING,
            status="outside",
            word=words.SETTINGS,
            evidence={"got": actual[layer], "wanted": expected[layer]},
            reason=f"rank and scaling are {actual_text}, not {expected_text}",
        )
    return bool(wrong_layers)


def record_gathered(context: Context, stage: Stage, model: torch.nn.Module, names: Collection[str]) -> None:
    """Record whether the parts of the adapter's tensors, put together by the library, are the bytes of the file."""
    for name in names:
        gathered = gather(model.get_parameter(name))
        layer, tensor = adapter_place(context.expected[name][0])
        expected = context.expected[name][1].to(gathered.dtype)
        row = TensorRecord(stage, layer, f"{tensor}.{GATHERED}", rule=Rule.BITWISE, status="equal")
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
    """Record a whole gradient, which every rank has, as a row, and a part of a gradient as a fact of this rank.

    Parameters
    ----------
    actual : torch.Tensor
        On the CPU, of `part.shape`.
    reference : Reference
        The whole gradient in float64, with the spread of its rounding errors.
    ending : str
        See `JoinedGroup.count_suffix`.
    """
    layer, tensor = row_of(context, name)
    tensor += ending
    if not context.record.wants(stage, layer):
        return
    if part.dim is None:
        row = TensorRecord(stage, layer, tensor, rule=Rule.BLOCK, status="measured")
        record_block(context, row, actual, reference=reference, name=name)
        return
    whole, whole_spread = reference.read(name), spread_of(context, reference, name)
    tolerance = context.record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    if 0 in part.shape or whole is None:
        return
    if whole_spread is None and tolerance is None:
        context.record.fact(stage, layer, tensor, status="skipped", reason="its rounding error is unknown")
        return
    exact = part.cut_from(mapped(whole))
    # a tolerance of the user takes the place of the spread's
    spread = None
    limit: UserTolerance | torch.Tensor | None = tolerance
    if tolerance is None and whole_spread is not None:
        spread = whole_spread.of_part(part.cut_from, part.whole)
        limit = spread.allowed(exact, actual.dtype)
    measured = measure_against_exact(actual, exact, limit)
    ratio = float(measured.ratio or 0) if spread is None else spread.figures(actual, exact).ratio
    record_part(
        context,
        stage,
        layer,
        tensor,
        measure=measured,
        chunks=lambda: exact_chunks(actual, exact, limit),
        ratio=ratio,
    )
