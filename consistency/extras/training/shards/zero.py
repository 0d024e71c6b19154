"""The adapter trained by DeepSpeed's ZeRO-3, which is installed or not: each rank holds a part of all tensors.

It gathers whole tensors itself, and each rank judges what it got: the bytes of the file before the first step, the
first averaged gradient, and the parameter after each step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from consistency.capture.names import adapter_place
from consistency.case.stage import Stage
from consistency.extras.training.parts_judging import HELD, reason_on_ranks, record_difference
from consistency.extras.training.ranks.group import JoinedGroup
from consistency.extras.training.sizes import STEPS
from consistency.extras.training.step_judging import StepJudge
from consistency.extras.training.steps import AVERAGED, UPDATED, StepFile, batches_of
from consistency.numerics.diagnosis_moved import OtherContents
from consistency.numerics.digest import digest
from consistency.worker.context import Context
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import outputs_by
from consistency.worker.recorder import Skip
from consistency.worker.training.adamw import optimizer_of
from consistency.worker.training.backward import Tensors, of_outputs, trainable

ZERO = "ZeRO-3"

_SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    # the optimizer of all stages, and not DeepSpeed's own
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,  # its default is a norm of 1
}

_served: list[str] = []
"""Folder of the group that DeepSpeed serves in this process: it keeps that group, and knows no other."""


def is_installed() -> bool:
    """Report whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


@contextmanager
def trained_by_zero(
    context: Context, ranks: JoinedGroup, stage: Stage, names: Sequence[str], parts: Sequence[Tensors]
) -> Iterator[tuple[StepJudge, list[StepFile], dict[str, torch.Tensor]] | str]:
    """Train, and yield a judge of the steps, the files of all ranks, and the parameters before the first step.

    Or the reason why nothing can be judged: a rank holds something else than the files say.

    Raises
    ------
    Skip
        DeepSpeed serves another group already, or takes no such model.
    """
    if _served and _served != [ranks.group.folder]:
        raise Skip("DeepSpeed serves one group in a process, and has served another")
    _served[:] = [ranks.group.folder]
    model = load_model(context.job.case, str(context.device))
    # of the model that this worker has by itself: between passes, ZeRO-3 leaves a parameter without elements
    layout = {name: context.model.get_parameter(name) for name in names}
    with ranks.torchrun_environment(), trainable(model, [model.get_parameter(name) for name in names]):
        with ranks.in_library(f"making the engine of {ZERO}"):
            engine = _engine(model, names)
        parameters = {name: model.get_parameter(name) for name in names}
        try:
            with ranks.in_library(f"gathering by {ZERO}"):
                start = {name: _gathered(parameter, layout[name].dtype) for name, parameter in parameters.items()}
            if reason := _record_start(context, ranks, stage, start):
                yield reason
                return
            own = StepFile.of_rank(ranks, ZERO, ranks.rank, layout)
            batches = batches_of(parts, rank=ranks.rank, world=ranks.world)
            with ranks.in_library(f"training, {ZERO}"):
                _train(ranks, engine, model, parameters, batches, own)
            # the files of the other ranks are whole once all have trained
            ranks.exchange(f"{ZERO}, trained", "")
            files = _files_of_ranks(ranks, own, layout)
            try:
                yield StepJudge(context, ranks, stage, files, title=f"{ZERO}, "), files, start
            finally:
                for file in files:
                    file.close()
        finally:
            engine.destroy()


def _files_of_ranks(ranks: JoinedGroup, own: StepFile, layout: Mapping[str, torch.nn.Parameter]) -> list[StepFile]:
    """Return the files of all ranks in their order; the other ranks' ones are opened."""
    files = []
    for rank in range(ranks.world):
        file = own if rank == ranks.rank else StepFile.of_rank(ranks, ZERO, rank, layout)
        files.append(file)
    return files


def _engine(model: torch.nn.Module, names: Sequence[str]) -> Any:
    import deepspeed  # type: ignore[import-not-found]  # no dependency: it is built where it is installed

    optimizer = optimizer_of([model.get_parameter(name) for name in names])
    return deepspeed.initialize(model=model, optimizer=optimizer, config=_SETTINGS)[0]


def _gathered(parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a whole parameter on the CPU."""
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-not-found]

    whole: torch.Tensor = safe_get_full_fp32_param(parameter)
    return whole.detach().to("cpu", dtype, copy=True)


def _record_start(context: Context, ranks: JoinedGroup, stage: Stage, start: Mapping[str, torch.Tensor]) -> str:
    """Record gathered parameters that are not the bytes of the file; return on which ranks there are any."""
    is_wrong = False
    for name, actual in start.items():
        expected = context.expected[name][1].to(actual.dtype)
        if digest(actual).value != digest(expected).value:
            is_wrong = True
            layer, tensor = adapter_place(context.expected[name][0])
            record_difference(
                context, stage, layer, f"{ZERO}, {tensor}.{HELD}", actual, expected, other_contents=OtherContents()
            )
    return reason_on_ranks(ranks, f"something else than the files say is gathered by {ZERO}", is_here=is_wrong)


def _loss(terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the loss as the one number that the engine goes back from."""
    return torch.stack([(tensor * weights).sum().float() for tensor, weights in terms]).sum()


def _train(
    ranks: JoinedGroup,
    engine: Any,
    model: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    batches: Sequence[Tensors],
    file: StepFile,
) -> None:
    """Train by the engine, and write gradients and parameters of each step into this rank's file."""
    from deepspeed.utils import safe_get_full_grad

    for step, batch in enumerate(batches):
        ranks.events.step(f"{ZERO}, step {step + 1}", step, STEPS)
        terms = of_outputs(outputs_by(engine, model, batch))
        engine.backward(_loss(terms))
        for name, parameter in parameters.items():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                file.write(AVERAGED, step, name, gradient.detach().to("cpu", parameter.dtype))
        engine.step()
        for name, parameter in parameters.items():
            file.write(UPDATED, step, name, _gathered(parameter, parameter.dtype))
