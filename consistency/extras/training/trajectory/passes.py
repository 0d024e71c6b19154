"""The passes of a training by one model."""

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
    """The results of one pass: the loss, and the gradients by parameter on the CPU."""

    loss: float
    gradients: Tensors

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        norms = (torch.linalg.vector_norm(gradient.to(torch.float64)) for gradient in self.gradients.values())
        return math.hypot(*(float(norm) for norm in norms))


class TrainingPasses:
    """Forward and backward passes of a model over the parts of a batch, one for each step, in turn.

    Attributes
    ----------
    parameters : dict
        The trained parameters, by name.
    kernels : RoundedProducts or None
        Kernels by which the model computes in its dtype; None for the device's own.
    multiplications : int
        Multiplications of one pass, backward included.
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

    def backward_of_step(self, step: int) -> tuple[Backward, TokenLoss]:
        """Return the backward pass of a step, with the parameters as they are, and its loss."""
        part = self._parts[step % len(self._parts)]
        loss = TokenLoss(part)
        backward = Backward(model=self.model, parameters=self.parameters, inputs=part, loss=loss, began=self._began)
        return backward, loss

    def run_pass(self, step: int, computed: Computed = as_it_is) -> TrainingPass:
        """Run one pass from end to end."""
        backward, loss = self.backward_of_step(step)
        with half_kernels.computing(self.kernels):
            return self.result(loss, from_end_to_end(backward, computed))

    def result(self, loss: TokenLoss, gradients: Gradients, dtype: torch.dtype | None = None) -> TrainingPass:
        """Return the results of a pass; where no output depends on a parameter, its gradient is zero.

        So it is in a step that no token of a batch takes to an expert.

        Parameters
        ----------
        dtype : torch.dtype, optional
            The dtype of such a zero; None for the parameter's.
        """
        gradient_of_all = {}
        for name, parameter in self.parameters.items():
            if name in gradients:
                gradient_of_all[name] = gradients[name]
            else:
                gradient_of_all[name] = torch.zeros(parameter.shape, dtype=dtype or parameter.dtype)
        return TrainingPass(loss=loss.value, gradients=gradient_of_all)

    def run_own_pass(self, step: int) -> TrainingPass:
        """Run one pass from end to end on the device that is checked."""
        return own_pass(self, step, lambda: self.run_pass(step, functools.partial(own_gradient, step)))

    def own_by_blocks(self, step: int, reference: Reference, replay: Replay) -> Gradients:
        """Return the gradients of the device that is checked, on the block inputs that a reference gives."""
        backward, _ = self.backward_of_step(step)
        computed = functools.partial(own_gradient, step)
        with half_kernels.computing(self.kernels):
            return own_pass(self, step, lambda: on_what_is_given(backward, reference, replay, computed))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let nothing but these parameters require a gradient, and put them back at the end."""
        with trainable(self.model, self.parameters.values()), put_back(self.parameters):
            yield

    def copy_parameters(self) -> Tensors:
        """Return a copy of the parameters on the CPU."""
        return {name: parameter.detach().to(CPU, copy=True) for name, parameter in self.parameters.items()}

    def set_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give the parameters these values on the CPU, rounded into their dtype."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name].to(parameter.dtype))


def own_pass(passes: TrainingPasses, step: int, run: Callable[[], T]) -> T:  # noqa: ARG001 - for a planted fault
    """Run a pass of a step on the device that is checked: where a fault of its forward pass is planted."""
    return run()


def own_gradient(step: int, name: str, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for a planted fault
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

    def __call__(self, outputs: Tensors) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return the terms of the loss, each with its weights."""
        loss = self._cross_entropy(outputs.get("logits"))
        if loss is not None:
            self.value = float(loss.detach())
            return [(loss, torch.ones_like(loss))]
        terms = of_outputs(outputs)
        self.value = sum(float((tensor.detach() * weights).sum(dtype=torch.float64)) for tensor, weights in terms)
        return terms

    def _cross_entropy(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        """Return the cross entropy of each next token; None for logits that are no answers to the tokens."""
        ids = self._ids
        if logits is None or ids is None or not logits.requires_grad:
            return None
        if logits.dim() != 3 or ids.dim() != 2 or ids.shape[0] != logits.shape[0]:
            return None
        virtual_tokens = logits.shape[1] - ids.shape[1]  # those that a prompt adds
        has_next_tokens = virtual_tokens >= 0 and ids.shape[1] >= 2
        if not has_next_tokens or int(ids.max()) >= logits.shape[2]:
            return None
        predicted, next_ids = logits[:, virtual_tokens:-1], ids[:, 1:].to(logits.device)
        return torch.nn.functional.cross_entropy(predicted.flatten(0, 1).float(), next_ids.flatten())
