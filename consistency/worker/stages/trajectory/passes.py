"""Steps of training by one model: in its dtype, in float64, or with noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from consistency.numerics.decisions import Watch
from consistency.worker.decisions.places import Places
from consistency.worker.decisions.replay import deciding
from consistency.worker.model import half_kernels
from consistency.worker.model.blocks import RecomputationError
from consistency.worker.model.running import matrix_elements, tokens_of
from consistency.worker.training import adamw
from consistency.worker.training.backward import Tensors, as_model_takes, backward, put_back, trainable
from consistency.worker.training.token_loss import TokenLoss

Watches = Callable[[], Watch | None]
"""Called at the start of a pass, again where one is begun anew, returns what watches its decisions."""


def _unwatched() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPass:
    """What one pass gives: the loss, hidden states and outputs on the CPU, and the gradients by parameter."""

    loss: float
    states: Tensors
    gradients: Tensors

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*(float(torch.linalg.vector_norm(g.to(torch.float64))) for g in self.gradients.values()))


class TrainingPasses:
    """Forward and backward passes of a model over the parts of a batch, one for each step, in turn.

    Attributes
    ----------
    parameters : dict
        That are trained, by name.
    multiplications : int
        Of one pass, backward included.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str], parts: Sequence[Tensors]) -> None:
        self.model = model
        self.parameters = {name: model.get_parameter(name) for name in names}
        # rounded once, before float64: the model casts its inputs to its own dtype
        self._parts = [as_model_takes(model, part) for part in parts]
        self._kernels = half_kernels.replacement(model, tokens_of(parts[0]))
        self._recompute = True
        # forward, and backward for inputs and factors
        self.multiplications = 3 * matrix_elements(model) * max(tokens_of(part) for part in parts)

    @property
    def computed_by(self) -> str:
        """How the model computes in its dtype, where not by the device's own kernels."""
        return half_kernels.described(self._kernels)

    def take(
        self, step: int, *, exact: bool = False, watches: Watches = _unwatched, places: Places | None = None
    ) -> TrainingPass:
        """Run one pass with the parameters as they are; where no output depends on one, its gradient is zero."""
        try:
            return self._take(step, exact=exact, watch=watches(), places=places)
        except RecomputationError:
            self._recompute = False
            return self._take(step, exact=exact, watch=watches(), places=places)

    def _take(self, step: int, *, exact: bool, watch: Watch | None, places: Places | None) -> TrainingPass:
        part = self._parts[step % len(self._parts)]
        loss, gradients = TokenLoss(part), dict[str, torch.Tensor]()
        with half_kernels.computing(None if exact else self._kernels):
            backward(
                self.model, list(self.parameters), part, gradients.__setitem__, recompute=self._recompute, exact=exact,
                watched=deciding(watch, gradient=True, places=places), loss=loss,
            )  # fmt: skip
        for name, parameter in self.parameters.items():
            if name not in gradients:  # as in a step that no token of a batch takes to an expert
                gradients[name] = torch.zeros_like(parameter, dtype=torch.float64 if exact else None)
        return TrainingPass(loss=loss.value, states=loss.states, gradients=gradients)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let nothing but these parameters require a gradient, and put them back at the end."""
        with trainable(self.model, self.parameters.values()), put_back(self.parameters):
            yield

    def begin(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give the parameters these values, rounded into their dtype."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])


def own_pass(passes: TrainingPasses, step: int, watches: Watches) -> TrainingPass:
    """Run a pass on the device that is checked: where a fault of its forward pass is planted."""
    return passes.take(step, watches=watches)


def computed(step: int, name: str, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for a planted fault
    """Return a gradient as this device computed it."""
    return gradient


def own_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the device that is checked."""
    return adamw.optimizer_of(parameters)
