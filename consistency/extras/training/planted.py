"""Faults of one rank of a group that trains, or holds, one model: in DistributedDataParallel, FSDP2 and a TP plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from consistency.extras.training.ranks.parts import local_part, part_of
from consistency.worker.faults.planting import Undo, instead

_SEED = 1
"""Seed of a rank that draws other numbers than the rest."""

_instead_of_wrapping = instead("torch.nn.parallel.distributed:DistributedDataParallel.__init__")
_instead_of_a_pass = instead("torch.nn.parallel.distributed:DistributedDataParallel.forward")
_instead_of_splitting = instead("consistency.extras.training.tensor_parallel.worker:load_tensor_parallel")


def _reducing(choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Take part in averaging the gradients, and give the optimizer another gradient.

    Parameters
    ----------
    choose : callable
        Returns that gradient, from this rank's own one and the average.
    """

    @_instead_of_wrapping
    def make(real: Callable[..., None], wrapped: Any, *arguments: Any, **options: Any) -> None:
        real(wrapped, *arguments, **options)

        def reduce(bucket: Any) -> Any:
            own_gradient = bucket.buffer().clone()
            future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
            return future.then(lambda done: choose(own_gradient, done.value()[0]))

        wrapped.register_comm_hook(None, lambda _, bucket: reduce(bucket))  # torch reads the annotations of a function

    return make


@_reducing
def not_averaged(own_gradient: torch.Tensor, _average: torch.Tensor) -> torch.Tensor:
    return own_gradient


@_reducing
def averaged_twice(_own_gradient: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    return average / dist.get_world_size()


@_instead_of_wrapping
def not_broadcast(
    real: Callable[..., None], wrapped: Any, model: torch.nn.Module, *arguments: Any, **options: Any
) -> None:
    """Keep an adapter that this rank initialized by itself, and lose the first rank's."""
    real(wrapped, model, *arguments, **options)
    _draw_again(model)


def _draw_again(model: torch.nn.Module) -> None:
    """Draw the adapter's factors as another seed does."""
    generator = np.random.Generator(np.random.PCG64(_SEED))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                values = generator.standard_normal(tuple(parameter.shape)) * float(parameter.abs().mean())
                parameter.copy_(torch.from_numpy(np.asarray(values)))


@instead("consistency.extras.training.shards.worker:fully_shard")
def other_seed(real: Callable[..., Any], module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
    """Initialize this rank's adapter anew, before FSDP2 takes the rank's part."""
    _draw_again(module)
    return real(module, *arguments, **options)


def _in_gathering(change: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[], Undo]:
    """Change the factors B that FSDP2 puts together from the parts of all ranks.

    Parameters
    ----------
    change : callable
        Changes a whole factor in place, given it and a copy of its values before the first step.
    """

    def install() -> Undo:
        first_values: dict[str, torch.Tensor] = {}

        @instead("torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_unsharded")
        def put_together(real: Callable[..., None], parameter: Any) -> None:
            real(parameter)
            name, whole = str(parameter._param_fqn), parameter._unsharded_param.data
            if "lora_B" in name:
                change(whole, first_values.setdefault(name, whole.clone()))

        return put_together()

    return install


@_in_gathering
def stale_part(whole: torch.Tensor, first: torch.Tensor) -> None:
    """Put together the parts that the ranks held before the first step."""
    whole.copy_(first)


@_in_gathering
def parts_swapped(whole: torch.Tensor, _first: torch.Tensor) -> None:
    half = len(whole) // 2
    whole.copy_(torch.cat([whole[half:], whole[:half]]))


@_instead_of_splitting
def part_of_another(real: Callable[..., torch.nn.Module], case: Any, world: int) -> torch.nn.Module:
    """Hold the next rank's part of the first factor that the plan splits."""
    from peft import load_peft_weights

    model = real(case, world)
    in_file = load_peft_weights(case.adapter, device="cpu")
    for name, parameter in model.named_parameters():
        key = name.replace(".default", "")  # files have no adapter's name in their keys
        part = part_of(parameter, rank=(dist.get_rank() + 1) % world, world=world)
        if key in in_file and part.dim is not None:
            local_part(parameter).copy_(part.cut_from(in_file[key]))
            break
    return model


@_instead_of_splitting
def scaled_by_ranks(real: Callable[..., torch.nn.Module], case: Any, world: int) -> torch.nn.Module:
    """Scale one layer's delta once for each rank."""
    model = real(case, world)
    layer: Any = next(module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict))
    layer.scaling = {name: scaling * world for name, scaling in layer.scaling.items()}
    return model


@_instead_of_a_pass
def hangs(_real: Callable[..., Any], *_: Any, **__: Any) -> None:
    """Never come to the collectives in which the others wait."""
    while True:
        time.sleep(1)


@_instead_of_a_pass
def raises(_real: Callable[..., Any], *_: Any, **__: Any) -> None:
    raise RuntimeError("a kernel of this rank failed")
