"""Backward passes of one model over the parts of a batch, in its dtype or in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Protocol

import torch

from consistency.numerics.decisions import Watch
from consistency.numerics.digest import TensorDigest, block_digests, combine
from consistency.numerics.dtype import name_of
from consistency.numerics.rounded_products import RoundedProducts
from consistency.worker.decisions.places import Places
from consistency.worker.decisions.replay import deciding
from consistency.worker.decisions.track import Track
from consistency.worker.model import half_kernels
from consistency.worker.model.blocks import RecomputationError
from consistency.worker.model.running import matrix_elements, tokens_of
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.stages.context import Context
from consistency.worker.training.backward import ONE_PASS, Tensors, backward_passes, parts_of

Blocks = dict[str, tuple[int, ...]]

Watches = Callable[[str], Watch | None]
"""Called with the number of a pass, returns what watches the decisions in it."""


def computed(name: str, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for a planted fault to choose by
    """Return a gradient as this device computed it."""
    return gradient


class Into(Protocol):
    """Takes the gradients of each pass, on the CPU."""

    def write(self, name: str, index: int, tensor: torch.Tensor) -> None: ...


class Runs:
    """Backward passes of one model over the parts of a batch.

    Attributes
    ----------
    parameters : dict
        By name.
    counts : dict
        Number of passes that give a parameter's gradient, by name.
    multiplications : int
        Of one forward pass over the batch.
    """

    def __init__(
        self, context: Context, model: torch.nn.Module, names: list[str], inputs: Tensors, *, tells: bool = True
    ) -> None:
        self._events = context.events if tells else None
        self.model = model
        self._passes = parts_of(inputs, rows=context.job.case.fit.micro_batch)
        self._recompute = True
        self.multiplications = matrix_elements(model) * tokens_of(inputs)
        self.parameters = {name: model.get_parameter(name) for name in names}
        self.counts = {n: 1 if p.numel() >= ONE_PASS else len(self._passes) for n, p in self.parameters.items()}

    def first_part(self) -> Runs:
        """Return the passes over the first part of the batch alone."""
        first = copy.copy(self)
        first._passes, first.counts = self._passes[:1], dict.fromkeys(self.counts, 1)
        return first

    def in_dtype(
        self,
        kernels: RoundedProducts | None,
        into: Into | None,
        label: str = "backward",
        *,
        watches: Watches | None = None,
        places: Places | None = None,
    ) -> dict[str, TensorDigest]:
        """Compute the gradients in the model's dtype, write them into a file where one is given, and digest them."""
        blocks: list[Blocks] = [{} for _ in self._passes]
        kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}

        def take(index: int, name: str, gradient: torch.Tensor) -> None:
            gradient = computed(name, gradient)
            kinds[name] = gradient.dtype, gradient.shape
            blocks[index][name] = block_digests(gradient)
            if into is not None:
                into.write(name, index, gradient.to("cpu").contiguous())

        with half_kernels.computing(kernels):
            self._run(label, take, watches=watches, places=places)
        return {
            name: combine(
                name_of(dtype), (self.counts[name], *shape), tuple(b for part in blocks for b in part.get(name, ()))
            )
            for name, (dtype, shape) in kinds.items()
        }

    def with_noise(self, kernels: RoundedProducts | None, into: TensorFile, products: str, *, watches: Watches) -> None:
        """Compute the gradients in the model's dtype with the noise that is active, and write them into a file."""

        def take(index: int, name: str, gradient: torch.Tensor) -> None:
            into.write(name, index, gradient.contiguous())

        with half_kernels.computing(kernels):
            self._run(f"backward, {products}", take, watches=watches)

    def in_float64(self, into: TensorFile, track: Track) -> None:
        """Compute the exact gradients on the track, and write them into a file."""

        def take(index: int, name: str, gradient: torch.Tensor) -> None:
            into.write(name, index, gradient.to(torch.float64).contiguous())

        self._run("backward, float64", take, exact=True, watches=track.exact, places=track.places)

    def _run(
        self,
        label: str,
        take: Callable[[int, str, torch.Tensor], None],
        *,
        exact: bool = False,
        watches: Watches | None = None,
        places: Places | None = None,
    ) -> None:
        index = 0
        while names := self._given_by(index):
            try:
                with backward_passes(self.model, names, recompute=self._recompute, exact=exact) as run:
                    while self._given_by(index) == names:
                        if self._events is not None:
                            self._events.step(label, index, len(self._passes))
                        watch = None if watches is None else watches(str(index))
                        watched = deciding(watch, gradient=True, places=places)
                        run(self._passes[index], functools.partial(take, index), watched)
                        index += 1
            except RecomputationError:
                self._recompute = False  # and this pass again

    def _given_by(self, index: int) -> list[str]:
        """Return the parameters whose gradients a pass gives; none after the last one."""
        return [name for name, count in self.counts.items() if index < count]
