"""A few steps of training by the ranks of a group, each on its own batch.

What each step leaves is in one file for each rank, which all read: gradients and parameters of a large adapter do not
fit in memory several times, and are judged tensor by tensor once the training is over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from consistency.numerics.file_tensor import Elements, Readable, elements_of, mapped
from consistency.worker.model.running import outputs_by
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.ranks.group import Joined
from consistency.worker.training.adamw import optimizer_of
from consistency.worker.training.backward import Tensors, loss_weights

STEPS = 3
"""With the second step the optimizer has moments, with the third these are used again."""

OWN, AVERAGED, UPDATED = "own", "averaged", "updated"
"""What there is of each step: a rank's own gradient, the one that its optimizer gets, and the parameter afterwards."""

Parameters = Mapping[str, torch.nn.Parameter]


class StepFile:
    """What one rank, or a device alone, has of each step, by kind, parameter and step.

    Parameters
    ----------
    parameters : mapping of str to torch.nn.Parameter
        Of which dtype and shape are taken, the whole shape where they are sharded.
    of_another : bool
        Read the file that another process has written.

    Attributes
    ----------
    steps : int
        How many there are.
    """

    def __init__(
        self,
        path: Path,
        parameters: Parameters,
        *,
        steps: int = STEPS,
        kinds: Sequence[str] = (OWN, AVERAGED, UPDATED),
        of_another: bool = False,
    ) -> None:
        self.steps = steps
        layout = {
            f"{kind}/{name}": (parameter.dtype, (steps, *parameter.shape))
            for kind in kinds
            for name, parameter in parameters.items()
        }
        self._file = TensorFile(path, layout, of_another=of_another)

    @classmethod
    def of_rank(cls, ranks: Joined, title: str, rank: int, parameters: Parameters) -> StepFile:
        """Return the file of one rank of a group, which this rank writes if it is its own."""
        return cls(ranks.folder / f"{title}-{rank}.safetensors", parameters, of_another=rank != ranks.rank)

    def write(self, kind: str, step: int, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor on any device, gathered where it is sharded: all ranks have to."""
        self._file.write(f"{kind}/{name}", step, whole(tensor).to("cpu").contiguous())

    def read(self, kind: str, name: str) -> Readable | None:
        """Return a tensor of all steps `(steps, *shape)`, None where none was written."""
        return self._file.read(f"{kind}/{name}")

    def of_step(self, kind: str, name: str, step: int) -> torch.Tensor:
        """Return the tensor of one step."""
        tensor = self.read(kind, name)
        assert tensor is not None
        return mapped(tensor)[step]

    def elements(self, kind: str, name: str, step: int) -> Elements:
        """Return a function that gives elements of the flattened tensor of one step."""
        tensor = self.read(kind, name)
        assert tensor is not None
        read, start = elements_of(tensor), step * math.prod(tensor.shape[1:])
        return lambda part: read(slice(start + part.start, start + part.stop))

    def close(self, *, remove: bool = False) -> None:
        self._file.close(remove=remove)


@contextmanager
def trained_by(
    ranks: Joined,
    title: str,
    model: torch.nn.Module,
    parameters: Parameters,
    batches: Sequence[Tensors],
    *,
    call: Callable[..., Any] | None = None,
    own_gradients: bool = False,
) -> Iterator[list[StepFile]]:
    """Train for a few steps, and yield the files of all ranks in their order.

    The loss of a batch is that of `consistency.worker.training.backward`.

    Parameters
    ----------
    title : str
        What is trained, in words of a file's name.
    batches : sequence of dict
        One for each step.
    call : callable, optional
        Runs the model, where a wrapper around it does.
    own_gradients : bool
        Keep each rank's own gradients too, as they reach the parameters.
    """
    with ExitStack() as stack:
        own = StepFile.of_rank(ranks, title, ranks.rank, parameters)
        stack.callback(own.close)
        with ranks.calling(f"training, {title}"):
            _train(ranks, title, model, parameters, batches, own, call=call or model, own_gradients=own_gradients)
        ranks.answers(f"{title}, trained", "")
        files = []
        for rank in range(ranks.world):
            file = own if rank == ranks.rank else StepFile.of_rank(ranks, title, rank, parameters)
            if file is not own:
                stack.callback(file.close)
            files.append(file)
        yield files


def _train(
    ranks: Joined,
    title: str,
    model: torch.nn.Module,
    parameters: Parameters,
    batches: Sequence[Tensors],
    file: StepFile,
    *,
    call: Callable[..., Any],
    own_gradients: bool,
) -> None:
    optimizer = optimizer_of(parameters.values())
    for step, batch in enumerate(batches):
        ranks.events.step(f"{title}, step {step + 1}", step, len(batches))
        with ExitStack() as hooks:
            for name, parameter in parameters.items() if own_gradients else ():
                hooks.callback(parameter.register_hook(functools.partial(file.write, OWN, step, name)).remove)
            _, ends = outputs_by(call, model, batch)
            ends = {name: tensor for name, tensor in ends.items() if tensor.requires_grad}
            if not ends:
                raise ValueError("no output of the model depends on the adapter")
            torch.autograd.backward(list(ends.values()), [loss_weights(tensor) for tensor in ends.values()])
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                file.write(AVERAGED, step, name, parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in parameters.items():
            file.write(UPDATED, step, name, parameter)


def batches_of(parts: Sequence[Tensors], *, rank: int, world: int) -> list[Tensors]:
    """Distribute the parts of a batch over ranks and steps, from the first again where there are too few."""
    return [parts[(step * world + rank) % len(parts)] for step in range(STEPS)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its gradient, gathered from all ranks where it is sharded."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found
