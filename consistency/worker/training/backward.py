"""The parts of a backward pass that every stage shares: parameters of an adapter, parts of a batch, and the loss.

The loss is a sum of the model's outputs, each element with a fixed sign and one power of two as its weight. Such a loss
exists for any model; it is linear, so the gradient that enters the model is exact and the same everywhere, and only the
backward pass can be wrong, not the loss. (A mean of squares would feed the forward pass's own errors in; a
cross-entropy needs targets, and a confident model has near-zero gradients.)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from consistency.case.budget.costs import TRAINING_PARTS
from consistency.worker.model.inputs import SEED
from consistency.worker.model.loading import ADAPTER_NAME

Tensors = dict[str, torch.Tensor]


def trained(model: Any, held: Mapping[str, object]) -> list[str]:
    """Return the floating-point parameters that training this adapter changes, of those that its file holds.

    PEFT itself is asked: an adapter's file may hold more, such as whole embeddings beside their factors
    (`save_embedding_layers`), and what is not trained has no gradient.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            if parameter.is_floating_point():
                parameter.requires_grad_(False)
        _mark_trainable(model)
        in_file = [
            (name, parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in held
        ]
        # prompt methods keep the parameters that they train in a module of their own
        names = {
            name: id(parameter)
            for name, parameter in in_file
            if parameter.requires_grad or name.startswith("prompt_encoder.")
        }
        if not names:  # a method with marks of its own: those that it left trainable on loading
            trainable_before = {id(parameter) for parameter, needed in flags if needed}
            names = {name: id(parameter) for name, parameter in in_file if id(parameter) in trainable_before}
    finally:
        for parameter, needed in flags:
            parameter.requires_grad_(needed)
    # a vector that layers share has the name of each in the model, and in the file one: it gets its first name, and
    # keeps the place of its last one
    names_backwards: dict[int, str] = {}
    for name, parameter_id in reversed(names.items()):
        names_backwards[parameter_id] = name
    return list(names_backwards.values())[::-1]


def _mark_trainable(model: Any) -> None:
    """Let PEFT set `requires_grad` of the parameters that training its adapter changes."""
    mark = getattr(model.base_model, "_mark_only_adapters_as_trainable", None)
    if mark is not None:  # the biases that a config trains; X-LoRA's own takes no model
        arguments = [model.base_model.model]
        mark(*arguments[: len(inspect.signature(mark).parameters)])
    # after the marks, which TinyLoRA takes from its vectors in inference, and OSF from heads that are saved whole
    model.set_adapter(ADAPTER_NAME)


def parts_of(inputs: Tensors) -> list[Tensors]:
    """Distribute the sequences over parts of a batch; inputs whose tensors differ in their rows are one part."""
    sizes = {tensor.shape[:1] for tensor in inputs.values()}
    count = 1
    if len(sizes) == 1 and () not in sizes:
        sequences = next(iter(sizes))[0]
        count = min(TRAINING_PARTS, sequences)
    parts: list[Tensors] = [{} for _ in range(count)]
    for name, tensor in inputs.items():
        pieces = torch.tensor_split(tensor, count) if count > 1 else [tensor]
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def go_back(terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Compute the gradients of a loss: the sum of all elements of tensors, each times its weight.

    Parameters
    ----------
    terms
        Tensors, each with a tensor of weights.

    Raises
    ------
    ValueError
        There are no tensors: no output of the model depends on the adapter.
    """
    if not terms:
        raise ValueError("no output of the model depends on the adapter")
    torch.autograd.backward([tensor for tensor, _ in terms], [weights for _, weights in terms])


def of_outputs(ends: Tensors) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Return every output that depends on the adapter, with its weights in the loss."""
    return [(tensor, loss_weights(tensor)) for tensor in ends.values() if tensor.requires_grad]


def loss_weights(output: torch.Tensor) -> torch.Tensor:
    """Return the loss's weights of one output: random signs times the power of two nearest to 1/sqrt(elements).

    Powers of two are exact in every dtype; with these the loss is about as large as one element of the output.
    """
    generator = np.random.Generator(np.random.PCG64(SEED))
    signs = generator.integers(0, 2, size=tuple(output.shape)) * 2 - 1
    size = 2.0 ** -round(np.log2(max(1, output.numel())) / 2)
    return torch.from_numpy(signs * size).to(output.device, output.dtype)


def as_model_takes(model: torch.nn.Module, inputs: Tensors) -> Tensors:
    """Return the inputs with floating-point ones in the model's dtype."""
    dtype = next(model.parameters()).dtype
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


@contextmanager
def put_back(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Restore the values that parameters and buffers have now, and their gradients, at the end of a `with` block."""
    values = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
                tensor.grad = gradients[name]


@contextmanager
def trainable(model: torch.nn.Module, wanted: Any) -> Iterator[None]:
    """Let gradients flow to these parameters alone, and restore that at the end."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            if parameter.is_floating_point():  # torch refuses to set it on integers, which have no gradient
                parameter.requires_grad_(False)
        for parameter in wanted:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, needed in flags:
            parameter.requires_grad_(needed)
