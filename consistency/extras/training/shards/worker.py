"""Stage `shards`: the ranks of a group train the adapter by FSDP2, each holding a part of every tensor.

The adapter is there before `fully_shard`, as transformers' Trainer and accelerate do it. Each rank holds its part of
the files' bytes. In each step the model computes with the parts that the ranks hold, put together.
The first step's gradient is compared with the average of the float64 gradients of the ranks' batches, by what rounding
makes; the parameters after each step with the optimizer's exact steps; what is saved with what the ranks hold.

An adapter that is added afterwards is a tensor of each rank's own, which nothing averages or broadcasts: the stage
trains one too, and says so where it finds the ranks with different adapters.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from consistency.capture.names import WHOLE_MODEL, adapter_place
from consistency.capture.wording import counted
from consistency.devices.backends import CPU
from consistency.extras.training.group_stage import UNFOLLOWED, run_in_group, training_inputs
from consistency.extras.training.parts_judging import (
    GATHERED,
    reason_on_ranks,
    record_difference,
    record_gradient,
    record_held,
)
from consistency.extras.training.ranks.group import JoinedGroup
from consistency.extras.training.ranks.parts import local_part
from consistency.extras.training.shards.saving import record_saved
from consistency.extras.training.shards.spec import SHARDS
from consistency.extras.training.shards.zero import ZERO, is_installed, trained_by_zero
from consistency.extras.training.sizes import STEPS
from consistency.extras.training.step_judging import StepJudge
from consistency.extras.training.steps import (
    AVERAGED,
    SEEN,
    UPDATED,
    StepFile,
    Watch,
    batches_of,
    trained_by,
    whole_tensor,
)
from consistency.extras.training.words import UNSYNCHRONIZED
from consistency.numerics.diagnosis_moved import Known
from consistency.numerics.digest import digest
from consistency.worker.context import Context
from consistency.worker.judging.block_rule import draw, passes_for_sums
from consistency.worker.judging.gradients import (
    ExactGradients,
    Gradients,
    as_it_is,
    backward_of,
    from_end_to_end,
)
from consistency.worker.memory.mapped_pages import trim
from consistency.worker.model.block_backward import Backward
from consistency.worker.model.float64_reference import Reference, publish
from consistency.worker.model.loading import ADAPTER_NAME, load_base, load_model
from consistency.worker.model.running import model_code
from consistency.worker.model.structure import blocks_of
from consistency.worker.protocol import GRADIENT_FILE
from consistency.worker.recorder import Skip
from consistency.worker.training.backward import Tensors, parts_of, trainable, trained

STAGE = SHARDS
AFTERWARDS = "adapter added after fully_shard"


def run(context: Context) -> None:
    """Train in both orders with the other ranks, on models of their own."""
    inputs, names = training_inputs(context)
    parts = parts_of(inputs)

    def train(ranks: JoinedGroup) -> None:
        answer = _exact_average(context, ranks, names, parts)
        _before(context, ranks, names, parts, answer)
        _free()
        with context.record.skipping(STAGE, AFTERWARDS):
            _afterwards(context, ranks, parts)
        if is_installed():
            _free()
            with context.record.skipping(STAGE, ZERO):
                _by_zero(context, ranks, names, parts, answer)

    run_in_group(context, STAGE, train)


def _free() -> None:
    """Give back the memory of a model that is not used any more: hooks of FSDP2 hold it in cycles."""
    gc.collect()
    trim()


def _before(
    context: Context, ranks: JoinedGroup, names: Sequence[str], parts: Sequence[Tensors], answer: Reference | str
) -> None:
    """Train with the adapter there before the model is sharded, and judge it."""
    model = load_model(context.job.case, str(context.device))
    with trainable(model, [model.get_parameter(name) for name in names]):
        with ranks.in_library("fully_shard"):
            _shard(model, ranks)
        with ranks.in_library("reading what each rank holds"):
            reason = record_held(context, ranks, STAGE, model, names)
        if reason:
            context.record.skipped(STAGE, reason, "training")
            return
        parameters = {name: model.get_parameter(name) for name in names}
        start = {name: local_part(parameter).to("cpu", copy=True) for name, parameter in parameters.items()}
        batches = batches_of(parts, rank=ranks.rank, world=ranks.world)
        with trained_by(ranks, "shards", model, parameters, batches, watch=_seen_in(model, names)) as files:
            own = files[ranks.rank]
            with_gradient = [name for name in names if own.read(AVERAGED, name) is not None]
            wrong = [name for name in with_gradient if not _record_seen(context, files, own, name)]
            context.record.fact(
                STAGE,
                WHOLE_MODEL,
                GATHERED,
                status="within" if wrong else "equal",
                evidence={"tensors": len(with_gradient), "steps": STEPS, "ranks": list(ranks.group.ranks)},
            )
            judge = StepJudge(context, ranks, STAGE, files)
            if _adds_up_averages(ranks):
                answer = (
                    f"gloo of torch {torch.__version__} gives the sum where FSDP2 asks for the average of gradients: "
                    "a later torch divides it"
                )
            answer = (
                reason_on_ranks(ranks, "something else than the ranks hold is computed with", is_here=bool(wrong))
                or answer
            )
            for name in with_gradient:
                if not isinstance(answer, str):
                    _record_first_gradient(context, ranks, name, own, answer)
                judge.judge_parameter(name, start[name])
            if isinstance(answer, str):
                context.record.skipped(STAGE, answer, "gradients")
            record_saved(
                context, ranks, STAGE, model, {n: whole_tensor(files, UPDATED, n, STEPS - 1) for n in with_gradient}
            )


def _seen_in(model: torch.nn.Module, names: Sequence[str]) -> Watch:
    """Return what writes the parameters that the model computes with, once its library has put them together."""

    @contextmanager
    def watching(file: StepFile, step: int) -> Iterator[None]:
        def note(prefix: str, module: torch.nn.Module, _given: Any) -> None:
            for name, parameter in module.named_parameters(prefix=prefix):
                if name in names and not isinstance(parameter, DTensor):
                    file.write(SEEN, step, name, parameter.detach().clone())  # NumPy pins what is freed after the pass

        with ExitStack() as hooks:
            sharded = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
            for name, module in model.named_modules():
                if name in sharded:
                    hooks.callback(module.register_forward_pre_hook(functools.partial(note, name)).remove)
            yield

    return watching


def _record_seen(context: Context, files: Sequence[StepFile], own: StepFile, name: str) -> bool:
    """Record the first step in which the model computed with a parameter that is not what the ranks held.

    Before the first step they hold the file's bytes, which `record_held` has seen to. Returns whether there is none.
    """
    if own.read(SEEN, name) is None or own.parts[name].dim is None:
        return True
    first = context.expected[name][1].to(own.tensor(SEEN, name, 0).dtype)
    before = [first, *(whole_tensor(files, UPDATED, name, step) for step in range(STEPS - 1))]
    wanted = [digest(tensor).value for tensor in before]
    step = next((i for i in range(STEPS) if digest(own.tensor(SEEN, name, i)).value != wanted[i]), None)
    if step is None:
        return True
    layer, part = adapter_place(context.expected[name][0])
    earlier = {value: f"what it was before step {number + 1}" for number, value in enumerate(wanted[:step])}
    record_difference(
        context,
        STAGE,
        layer,
        f"{part}.{GATHERED}",
        own.tensor(SEEN, name, step),
        before[step],
        known=Known(stale=lambda tensor: earlier.get(digest(tensor).value)),
        evidence={"step": step + 1},
    )
    return False


def _shard(model: torch.nn.Module, ranks: JoinedGroup) -> None:
    """Shard each repeated block, and what is outside of them, over all ranks."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    for block in blocks_of(model).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _adds_up_averages(ranks: JoinedGroup) -> bool:
    """Report whether a reduce-scatter on CPUs gives the sum where the average is asked for: gloo of torch 2.8 does."""
    if ranks.device.type != "cpu":
        return False
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.ones(ranks.world), op=dist.ReduceOp.AVG, group=ranks.process_group)
    return ranks.world > 1 and float(part) == ranks.world


def _exact_average(context: Context, ranks: JoinedGroup, names: list[str], parts: Sequence[Tensors]) -> Reference | str:
    """Return the average of the ranks' first gradients in float64, and what rounding makes in it; the first computes.

    Or why there is none.
    """
    why = ""
    if not ranks.rank:
        twin = context.model if context.device.type == CPU else load_model(context.job.case, CPU)
        try:  # code may insist on its own dtype
            with nullcontext() if context.device.type == CPU else context.events.on_cpu(), model_code(twin):
                _publish_average(context, ranks, twin, names, parts)
        except Skip as skip:
            why = str(skip)
    why = ranks.exchange("float64 gradients", why)[0]
    return why or Reference.of(ranks.folder / GRADIENT_FILE)


def _publish_average(
    context: Context, ranks: JoinedGroup, twin: torch.nn.Module, names: list[str], parts: Sequence[Tensors]
) -> None:
    first_batches = [batches_of(parts, rank=rank, world=ranks.world)[0] for rank in range(ranks.world)]
    of_ranks = [backward_of(twin, names, part) for part in first_batches]
    decided: list[str] = []

    def average(of_rank: Callable[[Backward], Gradients]) -> Gradients:
        found = [of_rank(of) for of in of_ranks]
        return {name: functools.reduce(torch.add, [one[name] for one in found]) / len(found) for name in found[0]}

    in_float64 = functools.partial(from_end_to_end, computed=as_it_is, exact=True, watch=decided.append)
    exact = ExactGradients(gradients=average(in_float64))
    if decided:
        raise Skip(UNFOLLOWED)
    passes = passes_for_sums(context, twin)
    drawn = draw(context, twin, lambda _: average(lambda of: from_end_to_end(of, as_it_is)), passes)
    publish(ranks.folder, *exact.tensors_with(drawn, of_ranks[0].wanted), GRADIENT_FILE)


def _record_first_gradient(
    context: Context, ranks: JoinedGroup, name: str, file: StepFile, reference: Reference, *, title: str = ""
) -> None:
    """Record the averaged gradient of the first step against the average of the float64 gradients of the batches."""
    record_gradient(
        context,
        STAGE,
        name,
        file.tensor(AVERAGED, name, 0),
        part=file.parts[name],
        reference=reference,
        ending=f"{ranks.count_suffix}{title}",
    )


def _by_zero(
    context: Context, ranks: JoinedGroup, names: Sequence[str], parts: Sequence[Tensors], answer: Reference | str
) -> None:
    """Train by ZeRO-3 with the adapter there before, and judge it."""
    with trained_by_zero(context, ranks, STAGE, names, parts) as trained_so:
        if isinstance(trained_so, str):
            raise Skip(trained_so)
        judge, files, start = trained_so
        own = files[ranks.rank]
        with_gradient = [name for name in names if own.read(AVERAGED, name) is not None]
        judge.compare_ranks(AVERAGED, with_gradient, "averaged gradients")
        judge.compare_ranks(UPDATED, with_gradient, "updated parameters")
        for name in with_gradient:
            if not isinstance(answer, str):
                _record_first_gradient(context, ranks, name, own, answer, title=f", {ZERO}")
            judge.judge_parameter(name, start[name])


def _afterwards(context: Context, ranks: JoinedGroup, parts: Sequence[Tensors]) -> None:
    """Train with an adapter that is added once the base is sharded, and record whether the ranks train the same."""
    case, before = context.job.case, cast("PeftModel", context.model)
    config = before.peft_config[ADAPTER_NAME]
    if config.is_prompt_learning and config.peft_type not in {"PREFIX_TUNING", "CARTRIDGE"}:
        raise Skip("PEFT reads the base's embedding outside of its pass, where fully_shard has it in parts")
    model = load_base(case, str(context.device)).model
    with ranks.in_library("fully_shard, and the adapter afterwards"):
        _shard(model, ranks)
        adapted: Any = PeftModel.from_pretrained(model, case.adapter, adapter_name=ADAPTER_NAME)
        adapted.eval()
    names = [name for name in trained(adapted, context.expected) if name in dict(context.model.named_parameters())]
    parameters = {name: adapted.get_parameter(name) for name in names}
    batches = batches_of(parts, rank=ranks.rank, world=ranks.world)
    with (
        trainable(adapted, parameters.values()),
        trained_by(ranks, "added-afterwards", adapted, parameters, batches) as files,
    ):
        judge = StepJudge(context, ranks, STAGE, files, title=f"{AFTERWARDS}, ")
        with_gradient = [name for name in names if files[ranks.rank].read(AVERAGED, name) is not None]
        odd = judge.differing(UPDATED, with_gradient, STEPS - 1)
    differing = len(odd)
    for answer in ranks.exchange(f"{AFTERWARDS}, differing", str(differing)):
        differing = max(differing, int(answer))
    context.record.fact(
        STAGE,
        WHOLE_MODEL,
        AFTERWARDS,
        status="within" if differing else "equal",
        word=UNSYNCHRONIZED if differing else None,
        evidence={"tensors": differing, "of": len(with_gradient), "steps": STEPS, "ranks": list(ranks.group.ranks)},
        reason=f"{differing} of {counted(len(with_gradient), 'tensor')} differ between ranks after {STEPS} steps"
        if differing
        else None,
    )
