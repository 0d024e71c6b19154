"""What goes backward: parameters of an adapter, parts of a batch, and the loss.

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
    kept = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            if parameter.is_floating_point():
                parameter.requires_grad_(False)
        mark = getattr(model.base_model, "_mark_only_adapters_as_trainable", None)
        if mark is not None:  # the biases that a config trains; X-LoRA's own takes no model
            mark(*[model.base_model.model][: len(inspect.signature(mark).parameters)])
        # after the marks, which TinyLoRA takes from its vectors in inference, and OSF from heads that are saved whole
        model.set_adapter(ADAPTER_NAME)
        held_here = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if name in held]
        # prompt methods keep what they train in a module of their own
        names = {name: id(p) for name, p in held_here if p.requires_grad or name.startswith("prompt_encoder.")}
        if not names:  # a method with marks of its own: what they left trainable on loading
            was = {id(parameter) for parameter, needed in kept if needed}
            names = {name: id(p) for name, p in held_here if id(p) in was}
    finally:
        for parameter, needed in kept:
            parameter.requires_grad_(needed)
    # a vector that layers share has the name of each, and in the file one
    return list({parameter: name for name, parameter in reversed(names.items())}.values())[::-1]


def parts_of(inputs: Tensors) -> list[Tensors]:
    """Distribute the sequences over parts; inputs that are no batch are one."""
    sizes = {tensor.shape[:1] for tensor in inputs.values()}
    count = 1
    if len(sizes) == 1 and () not in sizes:
        sequences = next(iter(sizes))[0]
        count = min(TRAINING_PARTS, sequences)
    split = {name: torch.tensor_split(tensor, count) if count > 1 else [tensor] for name, tensor in inputs.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(count)]


def go_back(terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Compute the gradients of a loss, the sum of tensors by their weights.

    Raises
    ------
    ValueError
        It has none: no output of the model depends on the adapter.
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
    """Put back the values that parameters and buffers have now, and their gradients."""
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])
                tensor.grad = gradients[name]


@contextmanager
def trainable(model: torch.nn.Module, wanted: Any) -> Iterator[None]:
    """Let gradients flow to these parameters alone, and restore that at the end."""
    kept = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            if parameter.is_floating_point():  # torch refuses to set it on integers, which have no gradient
                parameter.requires_grad_(False)
        for parameter in wanted:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, needed in kept:
            parameter.requires_grad_(needed)
