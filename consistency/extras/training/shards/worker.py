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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from consistency.capture.names import WHOLE_MODEL, adapter_place
from consistency.capture.records import RecordStatus
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
from consistency.extras.training.shards.frozen import FrozenGathered
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
from consistency.numerics.diagnosis_moved import OtherContents
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
        average = _exact_average(context, ranks, names, parts)
        _train_with_adapter_first(context, ranks, names, parts, average)
        _free_memory()
        with context.record.skipping(STAGE, AFTERWARDS):
            _train_with_adapter_afterwards(context, ranks, parts)
        if is_installed():
            _free_memory()
            with context.record.skipping(STAGE, ZERO):
                _train_by_zero(context, ranks, names, parts, average)

    run_in_group(context, STAGE, train)


def _free_memory() -> None:
    """Give back the memory of a model that is not used any more: hooks of FSDP2 hold it in cycles."""
    gc.collect()
    trim()


def _train_with_adapter_first(
    context: Context,
    ranks: JoinedGroup,
    names: Sequence[str],
    parts: Sequence[Tensors],
    average: Reference | str,
) -> None:
    """Train with an adapter that is there before the model is sharded, and judge the training.

    Parameters
    ----------
    average : Reference or str
        See `_exact_average`.
    """
    # a model of its own: fully_shard changes it in place
    model = load_model(context.job.case, str(context.device))
    with trainable(model, [model.get_parameter(name) for name in names]):
        with ranks.in_library("fully_shard"):
            _shard(model, ranks)
        with ranks.in_library("reading what each rank holds"):
            reason = record_held(context, ranks, STAGE, model, names)
        # on all ranks: the model computes with the parts of all
        if reason:
            context.record.skipped(STAGE, reason, "training")
            return
        parameters = {name: model.get_parameter(name) for name in names}
        start = {name: local_part(parameter).to("cpu", copy=True) for name, parameter in parameters.items()}
        batches = batches_of(parts, rank=ranks.rank, world=ranks.world)
        frozen = FrozenGathered(context, ranks, model, names)
        watch = _watch_gathered(model, names, frozen)
        with trained_by(ranks, "shards", model, parameters, batches, watch=watch) as files:
            with_gradient = _names_with_gradient(files[ranks.rank], names)
            is_right = _record_all_gathered(context, ranks, files, with_gradient)
            is_right = frozen.record() and is_right
            average = _usable_average(ranks, average, is_right=is_right)
            judge = StepJudge(context, ranks, STAGE, files)
            _judge_gradients_and_steps(context, ranks, judge, files[ranks.rank], start, with_gradient, average)
            if isinstance(average, str):
                context.record.skipped(STAGE, average, "gradients")
            saved = {name: whole_tensor(files, UPDATED, name, STEPS - 1) for name in with_gradient}
            record_saved(context, ranks, STAGE, model, saved)


def _names_with_gradient(file: StepFile, names: Sequence[str]) -> list[str]:
    return [name for name in names if file.read(AVERAGED, name) is not None]


def _record_all_gathered(context: Context, ranks: JoinedGroup, files: Sequence[StepFile], names: Sequence[str]) -> bool:
    """Record whether the model computed with the parts that the ranks hold, in every step; return whether it did."""
    own = files[ranks.rank]
    wrong_names = [name for name in names if not _record_gathered(context, files, own, name)]
    # within, for each wrong tensor has a fact of its own that is outside
    status: RecordStatus = "within" if wrong_names else "equal"
    evidence = {"tensors": len(names), "steps": STEPS, "ranks": list(ranks.group.ranks)}
    context.record.fact(STAGE, WHOLE_MODEL, GATHERED, status=status, evidence=evidence)
    return not wrong_names


def _usable_average(ranks: JoinedGroup, average: Reference | str, *, is_right: bool) -> Reference | str:
    """Return the exact average of the gradients, or the reason why it cannot judge this training's gradients."""
    if _adds_up_averages(ranks):
        average = (
            f"gloo of torch {torch.__version__} gives the sum where FSDP2 asks for the average of gradients: "
            "a later torch divides it"
        )
    reason = reason_on_ranks(ranks, "the computation uses other values than the ranks hold", is_here=not is_right)
    return reason or average


def _judge_gradients_and_steps(
    context: Context,
    ranks: JoinedGroup,
    judge: StepJudge,
    file: StepFile,
    start: Tensors,
    names: Sequence[str],
    average: Reference | str,
    *,
    title: str = "",
) -> None:
    """Judge the first averaged gradient, where its exact value is known, and the parameter after each step."""
    for name in names:
        if not isinstance(average, str):
            record_gradient(
                context,
                STAGE,
                name,
                file.tensor(AVERAGED, name, 0),
                part=file.parts[name],
                reference=average,
                ending=f"{ranks.count_suffix}{title}",
            )
        judge.judge_parameter(name, start[name])


def _watch_gathered(model: torch.nn.Module, names: Sequence[str], frozen: FrozenGathered) -> Watch:
    """Return a watch that writes the parameters that the model computes with, once its library has gathered them.

    Of parameters that nobody trains, `frozen` keeps what differs.
    """

    @contextmanager
    def watching(file: StepFile, step: int) -> Iterator[None]:
        def write(prefix: str, module: torch.nn.Module, _inputs: Any) -> None:
            for name, parameter in module.named_parameters(prefix=prefix):
                if isinstance(parameter, DTensor):
                    continue
                gathered = parameter.detach().clone()  # NumPy pins what is freed after the pass
                if name in names:
                    file.write(SEEN, step, name, gathered)
                else:
                    frozen.see(step, name, gathered)

        with ExitStack() as hooks:
            # in two steps: to mypy, what is known to be an FSDPModule has no hooks
            sharded_names = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
            for name, module in model.named_modules():
                if name in sharded_names:
                    hooks.callback(module.register_forward_pre_hook(functools.partial(write, name)).remove)
            yield

    return watching


def _record_gathered(context: Context, files: Sequence[StepFile], own: StepFile, name: str) -> bool:
    """Record the first step in which the model computed with other values of a parameter than the ranks held.

    Before the first step they hold the file's bytes, which `record_held` has seen to. Returns whether there is none.
    """
    # a parameter that every rank holds whole is not gathered
    if own.read(SEEN, name) is None or own.parts[name].dim is None:
        return True
    in_file = context.expected[name][1].to(own.tensor(SEEN, name, 0).dtype)
    expected = [in_file, *(whole_tensor(files, UPDATED, name, step) for step in range(STEPS - 1))]
    digests = [digest(tensor).value for tensor in expected]
    step = _first_difference(own, name, digests)
    if step is None:
        return True
    layer, tensor = adapter_place(context.expected[name][0])
    earlier_by_digest = {value: f"what it was before step {i + 1}" for i, value in enumerate(digests[:step])}
    record_difference(
        context,
        STAGE,
        layer,
        f"{tensor}.{GATHERED}",
        own.tensor(SEEN, name, step),
        expected[step],
        other_contents=OtherContents(stale=lambda actual: earlier_by_digest.get(digest(actual).value)),
        evidence={"step": step + 1},
    )
    return False


def _first_difference(own: StepFile, name: str, digests: Sequence[str]) -> int | None:
    """Return the first step in which the model computed with a parameter of another digest."""
    for step, expected in enumerate(digests):
        if digest(own.tensor(SEEN, name, step)).value != expected:
            return step
    return None


def _shard(model: torch.nn.Module, ranks: JoinedGroup) -> None:
    """Shard each repeated block, and then the modules outside of blocks, over all ranks."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    for block in blocks_of(model).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _adds_up_averages(ranks: JoinedGroup) -> bool:
    """Report whether a reduce-scatter on CPUs gives the sum where the average is asked for: gloo of torch 2.8 does."""
    if ranks.device.type != "cpu":
        return False
    result = torch.zeros(1)
    dist.reduce_scatter_tensor(result, torch.ones(ranks.world), op=dist.ReduceOp.AVG, group=ranks.process_group)
    return ranks.world > 1 and float(result) == ranks.world


def _exact_average(context: Context, ranks: JoinedGroup, names: list[str], parts: Sequence[Tensors]) -> Reference | str:
    """Return the average of the ranks' first gradients in float64, with the spread of its rounding; rank 0 computes it.

    Or why there is none.
    """
    reason = ""
    # the others wait for its answer, and read its file
    if not ranks.rank:
        is_on_cpu = context.device.type == CPU
        model = context.model if is_on_cpu else load_model(context.job.case, CPU)
        computing: AbstractContextManager[None] = nullcontext() if is_on_cpu else context.events.on_cpu()
        try:
            with computing, model_code(model):  # code may insist on its own dtype
                _publish_average(context, ranks, model, names, parts)
        except Skip as skip:
            reason = str(skip)
    reason = ranks.exchange("float64 gradients", reason)[0]
    return reason or Reference.open_published(ranks.folder / GRADIENT_FILE)


def _publish_average(
    context: Context, ranks: JoinedGroup, model: torch.nn.Module, names: list[str], parts: Sequence[Tensors]
) -> None:
    """Compute the exact average of the gradients of all ranks' first batches, and of noisy passes, and publish both."""
    first_batches = [batches_of(parts, rank=rank, world=ranks.world)[0] for rank in range(ranks.world)]
    backwards = [backward_of(model, names, batch) for batch in first_batches]
    decisions: list[str] = []

    def average(compute: Callable[[Backward], Gradients]) -> Gradients:
        gradients_of_ranks = [compute(backward) for backward in backwards]
        averages = {}
        for name in gradients_of_ranks[0]:
            terms = [gradients[name] for gradients in gradients_of_ranks]
            averages[name] = functools.reduce(torch.add, terms) / len(terms)
        return averages

    def noisy_average(_title: str) -> Gradients:
        return average(lambda backward: from_end_to_end(backward, as_it_is))

    in_float64 = functools.partial(from_end_to_end, computed=as_it_is, exact=True, watch=decisions.append)
    exact = ExactGradients(gradients=average(in_float64))
    # other passes may decide otherwise, and nothing here makes them follow
    if decisions:
        raise Skip(UNFOLLOWED)
    drawn = draw(context, model, noisy_average, passes_for_sums(context, model))
    publish(ranks.folder, *exact.tensors_with(drawn, backwards[0].parameters), GRADIENT_FILE)


def _train_by_zero(
    context: Context,
    ranks: JoinedGroup,
    names: Sequence[str],
    parts: Sequence[Tensors],
    average: Reference | str,
) -> None:
    """Train by ZeRO-3 with an adapter that is there before, and judge the training."""
    with trained_by_zero(context, ranks, STAGE, names, parts) as training:
        if isinstance(training, str):
            raise Skip(training)
        judge, files, start = training
        own = files[ranks.rank]
        with_gradient = _names_with_gradient(own, names)
        # every rank has whole tensors here, which have to have the same bits
        judge.compare_ranks(AVERAGED, with_gradient, "averaged gradients")
        judge.compare_ranks(UPDATED, with_gradient, "updated parameters")
        _judge_gradients_and_steps(context, ranks, judge, own, start, with_gradient, average, title=f", {ZERO}")


def _train_with_adapter_afterwards(context: Context, ranks: JoinedGroup, parts: Sequence[Tensors]) -> None:
    """Train with an adapter that is added once the base is sharded, and record whether the ranks train the same."""
    case, loaded = context.job.case, cast("PeftModel", context.model)
    config = loaded.peft_config[ADAPTER_NAME]
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
        with_gradient = _names_with_gradient(files[ranks.rank], names)
        own_count = len(judge.differing(UPDATED, with_gradient, STEPS - 1))
    # ranks that agree with most see no difference: all report that of the rank that differs in most tensors
    counts = ranks.exchange(f"{AFTERWARDS}, differing", str(own_count))
    differing_count = max(own_count, *map(int, counts))
    evidence = {
        "tensors": differing_count,
        "of": len(with_gradient),
        "steps": STEPS,
        "ranks": list(ranks.group.ranks),
    }
    if not differing_count:
        context.record.fact(STAGE, WHOLE_MODEL, AFTERWARDS, status="equal", evidence=evidence)
        return
    context.record.fact(
        STAGE,
        WHOLE_MODEL,
        AFTERWARDS,
        status="within",
        word=UNSYNCHRONIZED,
        evidence=evidence,
        reason=f"{differing_count} of {counted(len(with_gradient), 'tensor')} differ between ranks after {STEPS} steps",
    )
