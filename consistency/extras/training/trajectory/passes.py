"""Steps of training by one model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from consistency.devices.backends import CPU
from consistency.worker.decisions.replay import Replay
from consistency.worker.judging.gradients import (
    Computed,
    Gradients,
    as_it_is,
    from_end_to_end,
    on_what_is_given,
)
from consistency.worker.model import half_kernels
from consistency.worker.model.block_backward import Backward
from consistency.worker.model.block_pass import BlockBegan, no_listener
from consistency.worker.model.float64_reference import Reference
from consistency.worker.model.running import matrix_elements, tokens_of
from consistency.worker.training import adamw
from consistency.worker.training.backward import Tensors, as_model_takes, of_outputs, put_back, trainable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPass:
    """What one pass gives: the loss, and the gradients by parameter on the CPU."""

    loss: float
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
    kernels : RoundedProducts or None
        By which the model computes in its dtype, where not by the device's own.
    multiplications : int
        Of one pass, backward included.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        parts: Sequence[Tensors],
        *,
        began: BlockBegan = no_listener,
    ) -> None:
        self.model = model
        self._began = began
        self.parameters = {name: model.get_parameter(name) for name in names}
        # rounded once, before float64: the model casts its inputs to its own dtype
        self._parts = [as_model_takes(model, part) for part in parts]
        self.kernels = half_kernels.replacement(model, tokens_of(parts[0]))
        # forward, and backward for inputs and factors
        self.multiplications = 3 * matrix_elements(model) * max(tokens_of(part) for part in parts)

    def backward(self, step: int) -> tuple[Backward, TokenLoss]:
        """Return the pass of a step, with the parameters as they are, and its loss."""
        part = self._parts[step % len(self._parts)]
        loss = TokenLoss(part)
        of = Backward(model=self.model, wanted=self.parameters, inputs=part, loss=loss, began=self._began)
        return of, loss

    def take(self, step: int, computed: Computed = as_it_is) -> TrainingPass:
        """Run one pass from end to end."""
        of, loss = self.backward(step)
        with half_kernels.computing(self.kernels):
            return self.taken(loss, from_end_to_end(of, computed))

    def taken(self, loss: TokenLoss, gradients: Gradients, dtype: torch.dtype | None = None) -> TrainingPass:
        """Return what a pass gave; where no output depends on a parameter, its gradient is zero.

        So it is in a step that no token of a batch takes to an expert.
        """
        found = {
            name: gradients[name] if name in gradients else torch.zeros(p.shape, dtype=dtype or p.dtype)
            for name, p in self.parameters.items()
        }
        return TrainingPass(loss=loss.value, gradients=found)

    def take_own(self, step: int) -> TrainingPass:
        """Run the same on the device that is checked."""
        return own_pass(self, step, lambda: self.take(step, functools.partial(computed, step)))

    def own_by_blocks(self, step: int, reference: Reference, replay: Replay) -> Gradients:
        """Return the gradients of the device that is checked on what a reference gives."""
        of, _ = self.backward(step)
        with half_kernels.computing(self.kernels):
            return own_pass(
                self, step, lambda: on_what_is_given(of, reference, replay, functools.partial(computed, step))
            )

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let nothing but these parameters require a gradient, and put them back at the end."""
        with trainable(self.model, self.parameters.values()), put_back(self.parameters):
            yield

    def values(self) -> Tensors:
        """Return a copy of the parameters on the CPU."""
        return {name: parameter.detach().to(CPU, copy=True) for name, parameter in self.parameters.items()}

    def begin(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give the parameters these values on the CPU, rounded into their dtype."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name].to(parameter.dtype))


def own_pass(passes: TrainingPasses, step: int, run: Callable[[], T]) -> T:  # noqa: ARG001 - for a planted fault
    """Run a pass of a step on the device that is checked: where a fault of its forward pass is planted."""
    return run()


def computed(step: int, name: str, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for a planted fault
    """Return a gradient as this device computed it."""
    return gradient


def own_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the device that is checked."""
    return adamw.optimizer_of(parameters)


class TokenLoss:
    """Computes the loss that a language model is trained by, the cross entropy of each next token; keeps its value.

    A model without such an answer has the weighted sum of `consistency.worker.training.backward`.
    Logits are taken in float32 as trainers do; in a float64 pass that cast gives float64.
    """

    def __init__(self, inputs: Tensors) -> None:
        self._ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        self.value = 0.0

    def __call__(self, ends: Tensors) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        loss = self._of_tokens(ends.get("logits"))
        if loss is not None:
            self.value = float(loss.detach())
            return [(loss, torch.ones_like(loss))]
        terms = of_outputs(ends)
        self.value = sum(float((tensor.detach() * weights).sum(dtype=torch.float64)) for tensor, weights in terms)
        return terms

    def _of_tokens(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        ids = self._ids
        if logits is None or ids is None or not logits.requires_grad or logits.dim() != 3 or ids.dim() != 2:
            return None
        virtual = logits.shape[1] - ids.shape[1]  # tokens that a prompt adds
        if ids.shape[0] != logits.shape[0] or virtual < 0 or ids.shape[1] < 2 or int(ids.max()) >= logits.shape[2]:
            return None
        predicted, wanted = logits[:, virtual:-1], ids[:, 1:].to(logits.device)
        return torch.nn.functional.cross_entropy(predicted.flatten(0, 1).float(), wanted.flatten())
