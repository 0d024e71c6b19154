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
from consistency.case.stages import Stage
from consistency.numerics.digest import digest
from consistency.numerics.file_tensor import mapped
from consistency.worker.model.block_pass import ResultPlace, computing_on
from consistency.worker.model.running import outputs_by, without_gradients
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.model.tensor_parallel import load_tensor_parallel, ranks_of_a_plan
from consistency.worker.protocol import RankGroup
from consistency.worker.ranks.group import Joined, RefusedError
from consistency.worker.ranks.parts import gradient_held, part_of, whole
from consistency.worker.stages.block_rule import record_block
from consistency.worker.stages.context import Context
from consistency.worker.stages.group_stage import float64_of, in_group, skip, to_train
from consistency.worker.stages.parts_judging import record_gathered, record_gradient, record_held
from consistency.worker.training.backward import ONE_PASS, Tensors, go_back, of_outputs, parts_of, trainable

STAGE = Stage.TENSOR_PARALLEL


def run(context: Context) -> None:
    """Load the model in parts with the other ranks, and compare what it holds and computes."""
    found = to_train(context, STAGE)
    if found is None:
        return
    inputs, names = found

    def divides_the_heads(group: RankGroup) -> RankGroup:
        size = ranks_of_a_plan(context.base.model, len(group.ranks))
        first = group.rank // size * size
        if size == 1 or first + size > len(group.ranks):
            heads = "no group of ranks divides" if size == 1 else f"{size} of {len(group.ranks)} ranks divide"
            raise RefusedError(f"{heads} the attention heads of this model")
        return group.part(first, size)

    def compare(ranks: Joined) -> None:
        with ranks.numbered(), ranks.calling("loading by the tensor parallel plan"):
            model = load_tensor_parallel(context.job.case, ranks.world)
        with ranks.calling("reading what each rank holds"):
            reason = record_held(context, ranks, STAGE, model, names)
        if reason:
            skip(context, STAGE, reason, what="outputs and gradients")
            return
        with ranks.calling("gathering the tensors"):
            record_gathered(context, STAGE, model, names)
        _record_outputs(context, ranks, model, inputs)
        try:
            _record_gradients(context, ranks, model, names, inputs)
        except RefusedError as error:
            skip(context, STAGE, str(error), what="gradients")

    in_group(context, STAGE, compare, choose=divides_the_heads)


def _record_outputs(context: Context, ranks: Joined, model: torch.nn.Module, inputs: Tensors) -> None:
    """Record the results of blocks and the outputs with the adapter and without."""
    reference = float64_of(context, Stage.FORWARD)
    if isinstance(reference, str):
        skip(context, STAGE, reference, what="outputs")
        return
    adapted: Any = model
    for mode in (ADAPTER_ON, ADAPTER_OFF):
        exact = {name.partition("::")[2]: name for name in reference.tables.names if name.startswith(f"{mode}::")}
        if not exact:
            skip(context, STAGE, reference.tables.failures.get(mode, "no float64 result"), what=mode)
            continue
        found: Tensors = {}

        def given(name: str, own: torch.Tensor, mode: str = mode) -> torch.Tensor:
            return reference.given(mode, name, own)

        def take(place: ResultPlace, result: torch.Tensor, found: Tensors = found) -> None:
            found[str(place)] = whole(result).detach().to("cpu")

        with (
            ranks.calling(f"a forward pass, {mode}"),
            torch.no_grad(),
            without_gradients(model),
            adapted.disable_adapter() if mode == ADAPTER_OFF else nullcontext(),
            computing_on(model, given, take),
        ):
            for name, output in outputs_by(model, model, inputs)[1].items():
                take(ResultPlace(name), output)
        for name, result in found.items():
            place = ResultPlace.of(name)
            if name in exact and context.record.wants(STAGE, place.layer):
                tensor = f"{mode}.{place.part}" if place.part else mode
                record_block(
                    context, STAGE, place.layer, f"{tensor}{ranks.of_so_many}", actual=result,
                    digests=[digest(result)], reference=reference, name=exact[name], exact_name=exact[name],
                )  # fmt: skip


def _record_gradients(
    context: Context, ranks: Joined, model: torch.nn.Module, names: Sequence[str], inputs: Tensors
) -> None:
    """Record the gradients of the adapter over the parts of the batch."""
    reference = float64_of(context, Stage.GRADIENT)
    if isinstance(reference, str):
        skip(context, STAGE, reference, what="gradients")
        return
    parts = parts_of(inputs, rows=context.job.case.fit.micro_batch)
    parameters = {name: model.get_parameter(name) for name in names}
    counts = {name: 1 if parameter.numel() >= ONE_PASS else len(parts) for name, parameter in parameters.items()}
    held_here = {name: part_of(p, rank=ranks.rank, world=ranks.world) for name, p in parameters.items()}
    layout = {name: (p.dtype, (counts[name], *held_here[name].shape)) for name, p in parameters.items()}
    file = TensorFile(ranks.folder / f"gradients-{ranks.rank}.safetensors", layout)
    try:
        with ranks.calling("a backward pass"), trainable(model, parameters.values()):
            for index, part in enumerate(parts):
                context.events.step("backward", index, len(parts))
                go_back(of_outputs(*outputs_by(model, model, part)))
                for name, parameter in parameters.items():
                    if parameter.grad is not None and index < counts[name]:
                        file.write(name, index, gradient_held(parameter).to("cpu").contiguous())
                    parameter.grad = None
        for name in names:
            gradient, exact = file.read(name), reference.read(name)
            if gradient is not None and exact is not None:
                record_gradient(
                    context, STAGE, name, mapped(gradient), exact=mapped(exact), reference=reference,
                    part=held_here[name], ending=ranks.of_so_many,
                )  # fmt: skip
    finally:
        file.close()
