"""A few steps of training by the ranks of a group, each on its own batch.

The results of each step are in one file for each rank, which all read: gradients and parameters of a large adapter do
not fit in memory several times, and are judged tensor by tensor once the training is over. Of a tensor that ranks hold
in parts, each file has the part of its rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from consistency.extras.training.ranks.group import JoinedGroup
from consistency.extras.training.ranks.parts import local_part, part_of, put_together
from consistency.extras.training.sizes import STEPS
from consistency.numerics.file_tensor import Elements, Readable, elements_of, mapped
from consistency.worker.model.running import outputs_by
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.training.adamw import optimizer_of
from consistency.worker.training.backward import Tensors, go_back, of_outputs

OWN, SEEN, AVERAGED, UPDATED = "own", "seen", "averaged", "updated"
"""Kinds of tensors of each step: a rank's own gradient; the whole parameter that the model computes with, where ranks
hold parts; the gradient that the optimizer gets; and the parameter afterwards."""

Parameters = Mapping[str, torch.nn.Parameter]


class StepFile:
    """A file with the tensors that one rank, or a device alone, has of each step, by kind, parameter and step.

    Parameters
    ----------
    parameters : mapping of str to torch.nn.Parameter
        Parameters whose dtype and shape the file's tensors have.
    kinds : sequence of str
        Kinds of tensors that the file has.
    ranks : tuple of int
        The file's rank, and the number of ranks that hold parts: a device alone holds each whole tensor.
    of_another : bool
        Whether another process has written the file, which is only read here.

    Attributes
    ----------
    steps : int
        Number of steps.
    parts : dict of str to RankPart
        The rank's part of each parameter.
    """

    def __init__(
        self,
        path: Path,
        parameters: Parameters,
        *,
        steps: int = STEPS,
        kinds: Sequence[str] = (OWN, SEEN, AVERAGED, UPDATED),
        ranks: tuple[int, int] = (0, 1),
        of_another: bool = False,
    ) -> None:
        self.steps = steps
        rank, world = ranks
        self.parts = {name: part_of(parameter, rank=rank, world=world) for name, parameter in parameters.items()}
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for kind in kinds:
            for name, parameter in parameters.items():
                layout[f"{kind}/{name}"] = (parameter.dtype, (steps, *self._shape(kind, name)))
        # laid out in full before the first step: tensors are written in place, in any order
        self._file = TensorFile(path, layout, of_another=of_another)

    @classmethod
    def of_rank(cls, ranks: JoinedGroup, title: str, rank: int, parameters: Parameters) -> StepFile:
        """Return the file of one rank of a group, which this rank writes if it is its own."""
        path = ranks.folder / f"{title}-{rank}.safetensors"
        return cls(path, parameters, ranks=(rank, ranks.world), of_another=rank != ranks.rank)

    def _shape(self, kind: str, name: str) -> tuple[int, ...]:
        return self.parts[name].whole if kind == SEEN else self.parts[name].shape

    def write(self, kind: str, step: int, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor on any device; of a split tensor, this rank's part."""
        self._file.write(f"{kind}/{name}", step, local_part(tensor).to("cpu").contiguous())

    def read(self, kind: str, name: str) -> Readable | None:
        """Return a tensor of all steps `(steps, *shape)`, None where none was written."""
        return self._file.read(f"{kind}/{name}")

    def tensor(self, kind: str, name: str, step: int) -> torch.Tensor:
        """Return the tensor of one step."""
        of_all_steps = self.read(kind, name)
        assert of_all_steps is not None
        return mapped(of_all_steps)[step]

    def elements(self, kind: str, name: str, step: int) -> Elements:
        """Return a function that reads elements of the flattened tensor of one step."""
        of_all_steps = self.read(kind, name)
        assert of_all_steps is not None
        read, start = elements_of(of_all_steps), step * math.prod(of_all_steps.shape[1:])
        return lambda piece: read(slice(start + piece.start, start + piece.stop))

    def close(self, *, remove: bool = False) -> None:
        self._file.close(remove=remove)


def whole_tensor(files: Sequence[StepFile], kind: str, name: str, step: int) -> torch.Tensor:
    """Return a tensor of one step, put together from the parts of all ranks."""
    return put_together([file.tensor(kind, name, step) for file in files], files[0].parts[name])


Watch = Callable[[StepFile, int], AbstractContextManager[None]]
"""Return a context, from the file and the number of a step, that writes tensors which exist only during a pass."""


def watch_own_gradients(parameters: Parameters) -> Watch:
    """Return a watch that writes a rank's own gradients as they reach the parameters, before anybody averages them."""

    @contextmanager
    def watching(file: StepFile, step: int) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, parameter in parameters.items():
                hooks.callback(parameter.register_hook(functools.partial(file.write, OWN, step, name)).remove)
            yield

    return watching


def _watch_nothing(_file: StepFile, _step: int) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def trained_by(
    ranks: JoinedGroup,
    title: str,
    model: torch.nn.Module,
    parameters: Parameters,
    batches: Sequence[Tensors],
    *,
    call: Callable[..., Any] | None = None,
    watch: Watch = _watch_nothing,
) -> Iterator[list[StepFile]]:
    """Train for a few steps, and yield the files of all ranks in their order.

    The loss of a batch is that of `consistency.worker.training.backward`.

    Parameters
    ----------
    title : str
        Name of the training, which is part of the names of its files.
    batches : sequence of dict
        This rank's batches, one for each step.
    call : callable, optional
        Runs the model, where a wrapper around it does.
    watch : callable, optional
        Makes a context for the passes of each step.
    """
    with ExitStack() as stack:
        own = StepFile.of_rank(ranks, title, ranks.rank, parameters)
        stack.callback(own.close)
        with ranks.in_library(f"training, {title}"):
            _train(ranks, title, model, parameters, batches, own, call=call or model, watch=watch)
        # the files of the other ranks are whole once all have trained
        ranks.exchange(f"{title}, trained", "")
        files = []
        for rank in range(ranks.world):
            if rank == ranks.rank:
                files.append(own)
                continue
            file = StepFile.of_rank(ranks, title, rank, parameters)
            stack.callback(file.close)
            files.append(file)
        yield files


def _train(
    ranks: JoinedGroup,
    title: str,
    model: torch.nn.Module,
    parameters: Parameters,
    batches: Sequence[Tensors],
    file: StepFile,
    *,
    call: Callable[..., Any],
    watch: Watch,
) -> None:
    """Train, and write gradients and parameters of each step into this rank's file."""
    optimizer = optimizer_of(parameters.values())
    for step, batch in enumerate(batches):
        ranks.events.step(f"{title}, step {step + 1}", step, len(batches))
        with watch(file, step):
            go_back(of_outputs(outputs_by(call, model, batch)))
        for name, parameter in parameters.items():
            # prompts and experts may leave parameters without a gradient
            if parameter.grad is not None:
                file.write(AVERAGED, step, name, parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in parameters.items():
            file.write(UPDATED, step, name, parameter)


def batches_of(parts: Sequence[Tensors], *, rank: int, world: int) -> list[Tensors]:
    """Distribute the parts of a batch over ranks and steps, from the first again where there are too few."""
    return [parts[(step * world + rank) % len(parts)] for step in range(STEPS)]
