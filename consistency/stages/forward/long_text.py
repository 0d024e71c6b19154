"""The long text of the stage `forward`: blocks on as many tokens as people use, compared in a sample of rows.

A device's results depend on kernels that are chosen by shape: rows beyond a tile, long keys, a sliding window. So one
text is computed that is longer than the short ones. The worker that makes the reference runs it once in the tested
dtype, and what enters and leaves its blocks is given to all others, as in the passes over short texts; exact values and
passes with noise are of the sampled rows (`worker/model/sampled_rows.py`). Rows are named `adapter_on.long`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from consistency.capture.names import LONG_TOKENS, WHERE, WRONG_TOKENS
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.devices.backends import CPU
from consistency.numerics.decision import CONTINUOUS, Decision
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.exact import Float64Mode
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rules import Rule, passes
from consistency.worker.attention_kernels import AttentionKernels
from consistency.worker.context import Context
from consistency.worker.decisions.replay import deciding
from consistency.worker.judging.block_rule import (
    draw,
    passes_for,
    record_block,
    record_missed,
    rows_of,
    spread_of,
)
from consistency.worker.judging.long_text import LongText, long_mode
from consistency.worker.model import half_kernels
from consistency.worker.model.block_pass import (
    BlockBegan,
    BlockPass,
    Given,
    ResultPlace,
    Take,
    as_exact,
    no_listener,
)
from consistency.worker.model.float64_reference import Reference
from consistency.worker.model.id_checks import ask
from consistency.worker.model.running import base_of, model_code, refusal
from consistency.worker.model.sampled_rows import SampledPass, pick, run_all_rows, token_dimension
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.recorder import Skip

Tensors = dict[str, torch.Tensor]

_MOST_NAMED = 6
"""Wrong tokens that are named, where these are no stretch to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongReference:
    """What the worker that makes the reference computes of a long text.

    Attributes
    ----------
    given : dict
        What enters and leaves the blocks in the tested dtype, in all rows, by the names of their places.
    exact : dict
        Float64 results in the sampled rows, by the names of their places.
    drawn : dict
        Results of passes with noise, by the name of their products.
    """

    given: Tensors
    exact: Tensors
    drawn: dict[str, list[Tensors]]


def make_long_reference(context: Context, model: torch.nn.Module, text: LongText) -> LongReference:
    """Compute the long text on the CPU: once in the tested dtype, then its sampled rows in float64 and with noise.

    Raises
    ------
    Skip
        The model's code does not run so, or overflows.
    """
    with model_code(model):
        given, last = _give(model, text)
        sampled, exact = _sampled_exact(model, text, given, last)

        def compute(_: str) -> Tensors:
            results: Tensors = {}

            def take(place: ResultPlace, result: torch.Tensor) -> None:
                if str(place) in exact:
                    results[str(place)] = result.detach()

            _run(sampled, model, text, given, take)
            return results

        row_counts = [rows_of(tensor) for tensor in exact.values() if tensor.is_floating_point()]
        with half_kernels.computing(half_kernels.replacement(model, text.tokens)):
            drawn = draw(context, model, compute, passes_for(model, text.tokens, row_counts))
    return LongReference(given=given, exact=exact, drawn=drawn)


def _give(model: torch.nn.Module, text: LongText) -> tuple[Tensors, str]:
    """Run the chosen blocks in the tested dtype; return what enters and leaves them, by the names of their places.

    The second value is the place of the last block's result where only a head of words follows it, else empty.
    """
    given: Tensors = {}
    last = ""

    def keep(name: str, value: torch.Tensor) -> torch.Tensor:
        given[name] = value.detach().to(CPU, copy=True)
        return value

    def see(place: ResultPlace, _: torch.Tensor) -> None:
        nonlocal last
        if place.layer in text.blocks and not place.part.startswith("input."):
            last = str(place)

    with half_kernels.computing(half_kernels.replacement(model, text.tokens)):
        run_all_rows(model, text.inputs, BlockPass(keep, see), text.blocks)
    if any(bool(value.isnan().any()) for value in given.values()):
        raise Skip("what its blocks hand on is NaN on the CPU: there is nothing to compare with")
    has_head = ask(base_of(model), "get_output_embeddings") is not None
    return given, last if has_head else ""


def _sampled_exact(model: torch.nn.Module, text: LongText, given: Tensors, last: str) -> tuple[SampledPass, Tensors]:
    """Return the pass over the sampled rows that suits the model's code, and its float64 results."""
    sampled = SampledPass(tokens=text.tokens, rows=text.rows, last=last)
    try:
        return sampled, _compute_exact(model, text, sampled, given)
    except RuntimeError:
        if not last:
            raise
    # code behind the blocks that counts on a row for each token, as GPT-2's does
    sampled = SampledPass(tokens=text.tokens, rows=text.rows)
    return sampled, _compute_exact(model, text, sampled, given)


def _compute_exact(model: torch.nn.Module, text: LongText, sampled: SampledPass, given: Tensors) -> Tensors:
    """Return the float64 results in the sampled rows, without those that follow a decision in their block.

    A router may send a token elsewhere by rounding; what its experts make of the token is compared on the short texts.
    """
    dtype = next(p.dtype for p in model.parameters() if p.dtype in UNIT_ROUNDOFF)
    exact: Tensors = {}
    has_decided = False

    def note(decision: Decision) -> None:
        nonlocal has_decided
        if not sampled.is_quiet and decision.name not in CONTINUOUS:
            has_decided = True

    def begin(*_: Any) -> None:
        nonlocal has_decided
        has_decided = False

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        if not has_decided:
            exact[str(place)] = as_exact(result, dtype)

    with torch.no_grad(), exact_layers(model), Float64Mode(), deciding(note, gradient=False):
        _run(sampled, model, text, given, take, began=begin)
    return exact


def _run(
    sampled: SampledPass,
    model: torch.nn.Module,
    text: LongText,
    given: Mapping[str, torch.Tensor],
    take: Take,
    *,
    began: BlockBegan = no_listener,
) -> None:
    """Compute the sampled rows of the chosen blocks, and of the outputs, on given values."""

    def give(name: str, value: torch.Tensor) -> torch.Tensor:
        return given[name].to(value.dtype)

    outputs = sampled.run(model, text.inputs, give, take, text.blocks, began=began)
    began(0, 0, 1.0)  # the blocks have ended: what follows is no part of the last one
    for name, output in outputs.items():
        rows = pick(output, text.tokens, text.rows)
        if rows is not None:
            take(ResultPlace(name), rows)


def rows_on_device(model: torch.nn.Module, text: LongText, given: Given, began: BlockBegan = no_listener) -> Tensors:
    """Return the sampled rows of this device's results on the given values, copied to the CPU."""
    results: Tensors = {}

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        rows = pick(result.detach(), text.tokens, text.rows)
        if rows is not None:
            results[str(place)] = rows.to(CPU, copy=True)

    for name, output in run_all_rows(model, text.inputs, BlockPass(given, take, began=began), text.blocks).items():
        take(ResultPlace(name), output)
    return results


def row_of_long(long: str, name: str) -> tuple[str, str]:
    """Return the layer and the tensor of a row about a result of the long text."""
    place = ResultPlace.of(name)
    return place.layer, f"{long}.{place.part}" if place.part else long


def judge_long_text(context: Context, text: LongText, mode: str, reference: Reference) -> None:
    """Run the long text on this device, and record the sampled rows of every result that the reference has."""
    model, long = context.model, long_mode(mode)
    kernels, attention = half_kernels.replacement(model, text.tokens), AttentionKernels()
    given = functools.partial(reference.given_value, long)
    reason_of = functools.partial(refusal, context.job.case, model=model)
    digests: dict[str, list[TensorDigest]] = {}
    results: Tensors = {}
    with half_kernels.computing(kernels):
        for number in range(context.job.case.repeat):
            with attention.following(model) if number == 0 else nullcontext(), model_code(model, says=reason_of):
                again = rows_on_device(model, text, given)
            results = results or again
            for name, result in again.items():
                digests.setdefault(name, []).append(digest(result))
    for name, result in results.items():
        place = ResultPlace.of(name)
        if f"{long}::{name}" not in reference.tables.names or not context.record.wants(standard.FORWARD, place.layer):
            continue
        _, tensor = row_of_long(long, name)
        if missed := attention.missed(place.layer):
            record_missed(context, standard.FORWARD, (place.layer, tensor), result.dtype, missed)
            continue
        row = TensorRecord(
            standard.FORWARD,
            place.layer,
            tensor,
            rule=Rule.BLOCK,
            status="measured",
            evidence={
                LONG_TOKENS: text.tokens,
                **half_kernels.evidence(kernels),
                **attention.evidence(place.layer),
                **_where(context, reference, long, name, result, text),
            },
        )
        record_block(context, row, result, digests=digests[name], reference=reference, name=f"{long}::{name}")


def _where(
    context: Context, reference: Reference, long: str, name: str, result: torch.Tensor, text: LongText
) -> dict[str, Any]:
    """Return evidence on which of the sampled tokens are wrong; empty where none is, and where no figures judge."""
    exact, spread = reference.read(f"{long}::{name}"), spread_of(context, reference, f"{long}::{name}")
    if exact is None or spread is None or exact.shape != result.shape or not result.is_floating_point():
        return {}
    dim = token_dimension(result, len(text.rows))
    truth = mapped(exact)
    if dim is None or passes(spread.figures(result, truth).ratio):
        return {}
    wrong = []
    for number, token in enumerate(text.rows.tolist()):

        def row_of(tensor: torch.Tensor, number: int = number) -> torch.Tensor:
            return tensor.narrow(dim, number, 1)

        figures = spread.of_part(row_of, result.shape).figures(row_of(result), row_of(truth))
        if not passes(max(figures.row, figures.element)):
            wrong.append(token)
    return {WRONG_TOKENS: wrong, WHERE: where_in_text(wrong, text)} if wrong else {}


def where_in_text(wrong: Sequence[int], text: LongText) -> str:
    """Say in words which of the compared tokens are wrong: all, those from one on, or a few."""
    compared = text.rows.tolist()
    place = f"in a text of {text.tokens} tokens"
    if len(wrong) == len(compared):
        return f"{place}, in all {len(compared)} tokens that were compared"
    right_before = [token for token in compared if token < wrong[0]]
    if list(wrong) == compared[len(right_before) :]:
        return f"{place}, right up to token {right_before[-1]} and wrong from {wrong[0]} on, counted from 0"
    named = ", ".join(map(str, wrong[:_MOST_NAMED])) + (", …" if len(wrong) > _MOST_NAMED else "")
    return f"{place}, in {len(wrong)} of {len(compared)} tokens that were compared: {named}, counted from 0"
