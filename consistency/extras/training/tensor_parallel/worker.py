"""Stage `tensor-parallel`: the ranks of a group hold parts of each layer by transformers' plan, with PEFT's adapter.

Each rank holds its part of the files' bytes. Logits with and without the adapter, and its gradients, are compared with
the float64 results of the stages `forward` and `gradient` by what rounding makes on one device: so much more may they
not be off, and so *is the difference healthy?* has an answer.

A plan splits attention heads, which not every number of ranks divides: the ranks form groups of the largest size that
does, side by side. A mixture of experts that has a plan for these is loaded by both plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from consistency.capture.names import ADAPTER_OFF, ADAPTER_ON
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.extras.training.group_stage import float64_reference, run_in_group, training_inputs
from consistency.extras.training.parts_judging import record_gathered, record_gradient, record_held
from consistency.extras.training.ranks.group import JoinedGroup
from consistency.extras.training.ranks.parts import gather, local_gradient, part_of
from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rules import Rule
from consistency.worker.context import Context
from consistency.worker.judging.block_rule import record_block
from consistency.worker.judging.gradients import backward_of, crossing_by
from consistency.worker.model.block_backward import backward_by_blocks
from consistency.worker.model.block_pass import ResultPlace, computing_on
from consistency.worker.model.float64_reference import Reference
from consistency.worker.model.running import outputs_by, without_gradients
from consistency.worker.model.tensor_parallel import load_tensor_parallel, ranks_of_a_plan
from consistency.worker.protocol import RankGroup
from consistency.worker.recorder import Skip
from consistency.worker.training.backward import Tensors, trainable

STAGE = TENSOR_PARALLEL


def run(context: Context) -> None:
    """Load the model in parts with the other ranks, and compare its tensors, outputs and gradients."""
    inputs, names = training_inputs(context)

    def divides_the_heads(group: RankGroup) -> RankGroup:
        world = len(group.ranks)
        size = ranks_of_a_plan(context.base.model, world)
        if size == 1:
            raise Skip("no group of ranks divides the attention heads of this model")
        # groups side by side, from the first rank on
        first = group.rank // size * size
        # the last ranks are too few for a group
        if first + size > world:
            raise Skip(f"{size} of {world} ranks divide the attention heads of this model")
        return group.part(first, size)

    def compare(ranks: JoinedGroup) -> None:
        with ranks.torchrun_environment(), ranks.in_library("loading by the tensor parallel plan"):
            model = load_tensor_parallel(context.job.case, ranks.world)
        with ranks.in_library("reading what each rank holds"):
            reason = record_held(context, ranks, STAGE, model, names)
        # on all ranks: each result is made from the parts of all
        if reason:
            context.record.skipped(STAGE, reason, "outputs and gradients")
            return
        with ranks.in_library("gathering the tensors"):
            record_gathered(context, STAGE, model, names)
        _record_outputs(context, ranks, model, inputs)
        with context.record.skipping(STAGE, "gradients"):
            _record_gradients(context, ranks, model, names, inputs)

    run_in_group(context, STAGE, compare, choose=divides_the_heads)


def _record_outputs(context: Context, ranks: JoinedGroup, model: torch.nn.Module, inputs: Tensors) -> None:
    """Record the results of blocks and the outputs with the adapter and without."""
    reference = float64_reference(context, standard.FORWARD)
    if isinstance(reference, str):
        context.record.skipped(STAGE, reference, "outputs")
        return
    for mode in (ADAPTER_ON, ADAPTER_OFF):
        _record_mode(context, ranks, model, inputs, reference, mode)


def _record_mode(
    context: Context, ranks: JoinedGroup, model: torch.nn.Module, inputs: Tensors, reference: Reference, mode: str
) -> None:
    """Record the results of blocks and the outputs of one mode."""
    # names in the reference, by names of results
    exact_names = {name.partition("::")[2]: name for name in reference.tables.names if name.startswith(f"{mode}::")}
    if not exact_names:
        context.record.skipped(STAGE, reference.tables.failures.get(mode, "no float64 result"), mode)
        return
    for name, result in _results(ranks, model, inputs, reference, mode).items():
        place = ResultPlace.of(name)
        if name not in exact_names or not context.record.wants(STAGE, place.layer):
            continue
        tensor = f"{mode}.{place.part}" if place.part else mode
        row = TensorRecord(STAGE, place.layer, f"{tensor}{ranks.count_suffix}", rule=Rule.BLOCK, status="measured")
        record_block(context, row, result, reference=reference, name=exact_names[name])


def _results(ranks: JoinedGroup, model: torch.nn.Module, inputs: Tensors, reference: Reference, mode: str) -> Tensors:
    """Return the results of blocks, on the block inputs of the reference, and the outputs: whole ones, on the CPU."""
    adapted: Any = model
    results: Tensors = {}

    def block_input(name: str, own: torch.Tensor) -> torch.Tensor:
        return reference.given_value(mode, name, own)

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        results[str(place)] = gather(result).detach().to("cpu")

    with (
        ranks.in_library(f"a forward pass, {mode}"),
        torch.no_grad(),
        without_gradients(model),
        adapted.disable_adapter() if mode == ADAPTER_OFF else nullcontext(),
        computing_on(model, block_input, take),
    ):
        for name, output in outputs_by(model, model, inputs).items():
            take(ResultPlace(name), output)
    return results


def _record_gradients(
    context: Context, ranks: JoinedGroup, model: torch.nn.Module, names: Sequence[str], inputs: Tensors
) -> None:
    """Record the gradients, by blocks."""
    reference = float64_reference(context, standard.GRADIENT)
    if isinstance(reference, str):
        raise Skip(reference)
    backward = backward_of(model, list(names), inputs, began=context.events.block)
    gradients: dict[str, torch.Tensor] = {}
    with ranks.in_library("a backward pass"), trainable(model, backward.parameters.values()):
        backward_by_blocks(backward, crossing_by(reference), gradients.__setitem__)
    for name, gradient in gradients.items():
        exact = reference.read(name)
        if exact is None:
            continue
        parameter = backward.parameters.get(name)
        # gradients at the borders of blocks are judged whole: every rank has all of them
        if parameter is None:
            actual = gather(gradient)
            part = part_of(mapped(exact), rank=ranks.rank, world=ranks.world)
        else:
            actual = local_gradient(parameter, gradient)
            part = part_of(parameter, rank=ranks.rank, world=ranks.world)
        record_gradient(
            context,
            STAGE,
            name,
            actual.to("cpu").contiguous(),
            reference=reference,
            ending=ranks.count_suffix,
            part=part,
        )
